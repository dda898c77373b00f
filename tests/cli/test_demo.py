def test_demo_shows_texts_and_their_cost(h2okv_command, model_folder):
    outcome = h2okv_command("demo", "--model", model_folder, "--max-new-tokens", 16)
    assert outcome.code == 0
    assert "240 tokens of a novel" in outcome.out
    assert outcome.out.count(" ---\n") == 4
    for cache in ("best-v5:20%", "full cache", "h2o:20%", "recent:20%"):
        assert f"--- {cache} ---" in outcome.out
    for row in (
        "tokens generated",
        "time to first token",
        "tokens per second",
        "KV cache",
        "same next token",
    ):
        assert row in outcome.out
    # 0.1 + 0.1 of 240 tokens; 0.17 + 0.03 and 4 sinks, and what was written since the prompt.
    kept_line = next(line for line in outcome.out.splitlines() if "tokens kept" in line)
    assert kept_line.split()[2:] == ["255", "66", "48", "48"]
