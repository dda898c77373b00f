"""`best` measures each family with copies of its weights in bf16, as on CPUs that are faster so."""

import pytest
import torch
from family_harness import tiny_model, tokens
from family_table import variant_id, variants

from h2okv.budget import flat_factors
from h2okv.calibration import factors


@pytest.mark.slow
@pytest.mark.parametrize("variant", variants(), ids=variant_id)
def test_copies_in_bf16_measure_what_the_weights_do(variant, monkeypatch, capsys):
    outcomes, ids = [], tokens(1, 600)
    monkeypatch.setattr(factors, "_product_seconds", lambda dtype, _: dtype.itemsize)
    for copied in (range(0), range(1 << 30)):
        monkeypatch.setattr(factors, "_COPIED", copied)
        model = tiny_model(*variant).float()
        try:
            measured = torch.tensor(
                flat_factors(factors.measure_layer_budgets(model, ids, by_head=True))
            )
            assert measured.isfinite().all() and measured.mean() == pytest.approx(1, abs=0.01)
            error = None
        except ValueError as refusal:  # the same family is measured either way, or refused
            error = str(refusal)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note")]
        outcomes.append((error, notes))
    assert outcomes[0] == outcomes[1]
