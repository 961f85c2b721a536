"""Greedy continuation of prompts with the weights of a run: one process, no cache, every token a whole forward."""

from pathlib import Path

import torch
from transformers import AutoTokenizer

from launch.overrides import changed_model
from launch.run_directory import find_bos, find_tokenizer, model_of
from megatron_ext import checkpoint
from megatron_ext.context_parallel.layout import init_layout, leave_layout
from megatron_ext.model import LanguageModel, build_model, slice_context
from recipes.errors import UserError
from recipes.schema import ModelConfig


def greedy(path: str | Path, prompts: list[str], num_tokens: int, overrides: list[str] | None = None) -> list[str]:
    """Each prompt with up to `num_tokens` most likely next tokens, as text; stops at the end of a document.

    Args:
        path: a run directory or one of its checkpoints.
        overrides: `model.seq_length` and `model.attention.key=value`, such as another gate_threshold.

    Raises:
        UserError: no complete checkpoint, or an empty prompt.
    """
    step = checkpoint.find(path)
    run = step.parent.parent
    config = changed_model(model_of(run), overrides or [], length=True)
    tokenizer = AutoTokenizer.from_pretrained(str(find_tokenizer(run)))
    bos = find_bos(run, tokenizer)
    if not all(prompts):
        raise UserError("a prompt is empty; give at least one character")
    init_layout(tensor=1, context=1, device="cpu", timeout_seconds=60.0)
    try:
        model = load_model(config, step)
        return [_continue(model, config, tokenizer, bos, prompt, num_tokens) for prompt in prompts]
    finally:
        leave_layout()


def _continue(
    model: LanguageModel, config: ModelConfig, tokenizer, bos: int | None, prompt: str, num_tokens: int
) -> str:
    text = tokenizer.encode(prompt, add_special_tokens=False)
    head = [] if bos is None or text[:1] == [bos] else [bos]
    tokens = head + text
    for _ in range(num_tokens):
        tokens.append(int(next_token_logits(model, config, tokens[-config.seq_length :]).argmax()))
        if tokens[-1] == tokenizer.eos_token_id:
            break
    return tokenizer.decode(tokens[len(head) :])


def load_model(config: ModelConfig, step: Path) -> LanguageModel:
    """The whole model in fp32 on the CPU, with the weights of a checkpoint, for inference."""
    model = build_model(config)
    checkpoint.load_weights(model, step, config)
    return model.eval()


@torch.no_grad()
def next_token_logits(model: LanguageModel, config: ModelConfig, tokens: list[int]) -> torch.Tensor:
    """Logits [V] of the token after `tokens`."""
    batch = torch.tensor([tokens])
    context = slice_context(config, torch.zeros_like(batch), start=0, length=len(tokens))
    return model(batch, context)[0, -1]
