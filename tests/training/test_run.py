import pytest
import torch

from training import checkpoint, model, schedule
from training.optimizer import Optimizers

pytestmark = pytest.mark.slow


def test_schedule_ends_at_zero_and_context_grows():
    assert schedule.learning_rate_share(0.0) == 0.0
    assert schedule.learning_rate_share(0.2) == 1.0
    assert schedule.learning_rate_share(1.0) == 0.0
    lengths = [schedule.context(share / 100) for share in range(101)]
    assert lengths == sorted(lengths)
    assert lengths[-1] == model.MAX_POSITIONS


def test_block_attention_is_causal_attention(tokenizer):
    net = model.build_model(model.build_config(tokenizer, layers=2)).eval()
    tokens = torch.randint(2, len(tokenizer), (2, 300))
    with torch.no_grad():
        blocks = net(tokens).logits
        net.set_attn_implementation("sdpa")
        assert torch.allclose(blocks, net(tokens).logits, atol=1e-4)


def test_a_resumed_run_takes_the_same_step(tokenizer, tmp_path):
    tokens = torch.randint(2, len(tokenizer), (2, 33))

    def make():
        net = model.build_model(model.build_config(tokenizer, layers=1))
        return net, Optimizers(net)

    def step(net, optimizers):
        model.NextTokenLoss(net)(tokens).backward()
        optimizers.step(1.0)

    net, optimizers = make()
    step(net, optimizers)
    progress = checkpoint.Progress(step=1, tokens=64, window=2, seconds=0.5)
    checkpoint.save(tmp_path, progress, model=net.state_dict(), optimizers=optimizers.state_dict())
    step(net, optimizers)

    again, its_optimizers = make()
    loaded, states = checkpoint.load(tmp_path)
    again.load_state_dict(states["model"])
    its_optimizers.load_state_dict(states["optimizers"])
    step(again, its_optimizers)
    assert loaded == progress
    for parameter, restored in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(parameter, restored)
