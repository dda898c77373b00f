"""The shape of the bundled model and its two losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from training import attention

MAX_POSITIONS = 2048


def build_config(tokenizer: PreTrainedTokenizerFast, layers: int = 6) -> LlamaConfig:
    """Describe a small Llama: grouped queries, few heads of 64, tied embeddings.

    Args:
        tokenizer: Gives the vocabulary and the special tokens.
        layers: Number of decoder layers.

    Returns:
        The configuration.
    """
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def build_model(config: LlamaConfig, seed: int = 0) -> LlamaForCausalLM:
    """Make the model with fresh weights and the training attention."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM._from_config(config, attn_implementation=attention.register())
    # No gradient may reach the padding row by itself: EOS pads, and it is a real token here.
    model.model.embed_tokens.padding_idx = None
    return model


def head_loss(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Compute the mean loss of `target` [B, T] from the last hidden states [B, T, hidden]."""
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class NextTokenLoss:
    """The mean loss of tokens 1.. of windows, under bf16 autocast.

    Compiled by parts: one layer serves all layers, so a new window length costs seconds, not
    minutes.

    Args:
        model: The model to train.
        compiled: Whether to use torch.compile.
    """

    def __init__(self, model: LlamaForCausalLM, compiled: bool = False) -> None:
        self.model = model
        self.head = head_loss
        if compiled:
            self.head = torch.compile(head_loss, dynamic=False)
            for layer in model.model.layers:
                layer.compile(dynamic=False)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute the loss of windows [B, T + 1]."""
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
            return self.head(hidden, self.model.lm_head.weight, tokens[:, 1:])


@torch.no_grad()
def loss_and_hits(
    model: LlamaForCausalLM, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute for every token after the first its loss and whether it was the first choice.

    Args:
        model: The model.
        tokens: Windows [B, T].

    Returns:
        Loss [B, T - 1] and hit [B, T - 1]; column i is about token i + 1.
    """
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits.float()
    target = tokens[:, 1:]
    loss = F.cross_entropy(logits.transpose(1, 2), target, reduction="none")
    return loss, logits.argmax(-1) == target
