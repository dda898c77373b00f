"""`benchmarks/kvpress_quality.py`: files of the wrong kind."""

import sys

import pytest


@pytest.mark.parametrize("step", ["presses", "table"])
def test_a_file_that_is_no_json_is_named_with_its_line(
    import_benchmark, monkeypatch, tmp_path, capsys, step
):
    script = import_benchmark("kvpress_quality")
    path = tmp_path / "prompts.csv"
    path.write_text("sample,prompt\n1,2\n")
    args = {
        "presses": [path, "--model", "m", "--out", tmp_path / "rows.jsonl"],
        "table": [path, path, path, "--against", "h2o"],
    }[step]
    monkeypatch.setattr(sys, "argv", ["kvpress_quality.py", step, *map(str, args)])
    with pytest.raises(SystemExit) as exit_:
        script.main()
    err = capsys.readouterr().err
    assert exit_.value.code == 2 and f"line 1 of {path} is not JSON; give" in err
