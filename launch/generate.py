"""Greedy continuation of prompts with the weights of a run: one process, no cache, every token a whole forward."""

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from launch.overrides import changed_model
from launch.run_directory import find_bos, find_tokenizer, model_of
from launch.tokenizers import open_fitting_tokenizer
from megatron_ext import checkpoint
from megatron_ext.model import LanguageModel, build_model, slice_context
from megatron_ext.parallel.layout import init_layout, leave_layout
from recipes.errors import UserError
from recipes.schema import ModelConfig


def greedy(path: str | Path, prompts: list[str], num_tokens: int, overrides: list[str] | None = None) -> list[str]:
    """Each prompt with up to `num_tokens` most likely next tokens, as text; stops at the end of a document.

    Args:
        path: a run directory or one of its checkpoints.
        overrides: `model.seq_length` and `model.attention.key=value`, such as another gate_threshold.

    Raises:
        UserError: no complete checkpoint, a tokenizer that does not fit the model, or a prompt that is empty, no text,
            or too long for `model.seq_length`.
    """
    for prompt in prompts:
        _check_text(prompt)
    step = checkpoint.find(path)
    run = step.parent.parent
    config = changed_model(model_of(run), overrides or [], length=True)
    tokenizer = open_fitting_tokenizer(find_tokenizer(run), config)
    bos = find_bos(run, tokenizer)
    begun = [_encode(tokenizer, bos, prompt, num_tokens, config.seq_length) for prompt in prompts]
    init_layout(tensor=1, context=1, device="cpu", timeout_seconds=60.0)
    try:
        model = load_model(config, step)
        return [_continue(model, config, tokenizer, *start, num_tokens) for start in begun]
    finally:
        leave_layout()


def _check_text(prompt: str) -> None:
    if not prompt:
        raise UserError("a prompt is empty; give at least one character")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # the shell's bytes, which Python keeps as halves of characters
        raise UserError(f"the prompt {prompt!r} is not UTF-8 text; convert it, for example with iconv") from error


def _encode(
    tokenizer: PreTrainedTokenizerFast, bos: int | None, prompt: str, num_tokens: int, seq_length: int
) -> tuple[list[int], list[int]]:
    """What goes in front of a prompt, and the prompt, as ids; nothing of either is ever cut off."""
    text = tokenizer.encode(prompt, add_special_tokens=False)
    head = [] if bos is None or text[:1] == [bos] else [bos]
    if not head + text:
        raise UserError(f"the prompt {prompt!r} is no token of the tokenizer; give other text")
    read = len(head) + len(text) + num_tokens - 1  # the last token is not read again
    if read > seq_length:
        raise UserError(
            f"the prompt that begins with {prompt[:40]!r} has {len(head) + len(text)} tokens, and {num_tokens} more "
            f"make a sequence of {read}, but the model reads {seq_length}; shorten it, lower --tokens, or give "
            f"model.seq_length={read}"
        )
    return head, text


def _continue(
    model: LanguageModel,
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerFast,
    head: list[int],
    text: list[int],
    num_tokens: int,
) -> str:
    tokens = head + text
    for _ in range(num_tokens):
        tokens.append(int(next_token_logits(model, config, tokens).argmax()))
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
