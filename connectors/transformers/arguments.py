"""Checks of the arguments of `CachedModel`: token ids, separators, options of generation."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from lmc.blend.markers import Markers
from lmc.errors import ConfigError, InputError

# Values of options of model.generate that continue one sequence after a prefilled prompt. They override the model's
# generation config: without `use_cache`, and with prompt lookup, transformers gives wrong answers after such a prompt.
CONTINUES = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "return_dict_in_generate": False,
    "use_cache": True,
    "cache_implementation": None,
    "prompt_lookup_num_tokens": None,
}
REFUSED = "cache", "past_key_values", "attention_mask", "assistant_model"  # options that a caller may not give


def checked_tokens(token_ids: Any, name: str, positions: int, vocabulary: int) -> list[int]:
    """Return token ids as integers. Raises `InputError` if they are not one valid prompt of the model.

    `token_ids` is a list, or an array or tensor of shape `[T]` or `[1, T]`. Tokenizers return `[1, T]`.
    """
    listed = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
    if isinstance(listed, list | tuple) and len(listed) == 1 and isinstance(listed[0], list | tuple):
        listed = listed[0]
    try:
        tokens = [operator.index(token) for token in listed]
    except TypeError as error:
        reason = "must be a sequence of integer token ids, one prompt at a time"
        raise InputError(f"the {name} {reason}: {error}") from error
    if not tokens:
        raise InputError(f"the {name} is empty")
    if len(tokens) > positions:
        raise InputError(f"the {name} has {len(tokens)} tokens, but the model accepts at most {positions}")
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        raise InputError(f"the {name} has tokens outside the vocabulary of {vocabulary} tokens")
    return tokens


def checked_markers(separators: Markers | Sequence[int], vocabulary: int) -> Markers:
    """Return the markers that split prompts. Raises `ConfigError` unless given markers or one separator's token ids."""
    if isinstance(separators, Markers):
        return separators
    try:
        return Markers(separators=(tuple(checked_tokens(separators, "separator", len(separators), vocabulary)),))
    except (TypeError, InputError) as error:
        raise ConfigError(
            f"invalid separators {separators}: use `Markers`, or the token ids of one separator ({error})"
        ) from error


def check_options(options: Mapping[str, Any]) -> None:
    """Raise `InputError` for options of generation that cannot continue a prefilled cache."""
    refused = [name for name, fine in CONTINUES.items() if options.get(name, fine) != fine]
    refused += [name for name in REFUSED if options.get(name) is not None]
    if refused:
        reason = (
            "it continues one sequence after a prefilled prompt. Leave them out, or call model.generate without lmc"
        )
        raise InputError(f"generate does not support {', '.join(refused)}: {reason}")
