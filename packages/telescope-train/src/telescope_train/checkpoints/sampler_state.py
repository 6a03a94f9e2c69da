"""The sampler's part of a checkpoint as MessagePack: each chain of tokens once, 4 bytes a number.

Checkpoints of earlier versions hold JSON with the whole prompt of every turn; they are still read.
"""

from array import array
from pathlib import Path
from typing import Any

import msgspec

from telescope_core.base.chains import TokenChain, chains_of
from telescope_core.base.errors import ConfigError
from telescope_core.records.tokens import PER_TURN, linked, tokens_of_turns
from telescope_train.rollouts.sampled import SamplerState

_NAME = "sampler.msgpack"
_OLD_NAME = "sampler.json"


class _Chain(msgspec.Struct, array_like=True):
    parent: int | None
    num_shared: int
    token_ids: bytes
    """int32 in the byte order of the machine that writes and reads them."""
    logprobs: bytes
    """float32."""
    routes: bytes = b""
    """int16; for a mixture of experts whose servers report the expert of each token."""
    routes_shape: tuple[int, int] | None = None


class _File(msgspec.Struct):
    chains: list[_Chain]
    """Chains of all rollouts, parents before their children."""
    state: msgspec.Raw
    """The `SamplerState`, with numbers in place of chains."""


_FILE = msgspec.msgpack.Decoder(_File)


def write_sampler_state(folder: Path, state: SamplerState) -> None:
    """Write `state` to a checkpoint's folder."""
    chains = chains_of(
        turn.completion.tokens for rollout in state.all_rollouts for turn in rollout.turns
    )
    numbers = {id(chain): number for number, chain in enumerate(chains)}

    def encoded(value: object) -> object:
        if isinstance(value, TokenChain):
            return numbers[id(value)]
        # Rewards and metrics may be scalars of numpy.
        if hasattr(value, "item"):
            return value.item()
        raise TypeError(f"{type(value).__name__} cannot be saved with the sampler's state")

    file = _File(
        chains=[
            _Chain(
                parent=None if chain.parent is None else numbers[id(chain.parent)],
                num_shared=chain.num_shared,
                token_ids=chain.own_ids.tobytes(),
                logprobs=chain.logprobs.tobytes(),
                routes=bytes(chain.own_routes),
                routes_shape=chain.routes_shape,
            )
            for chain in chains
        ],
        state=msgspec.Raw(msgspec.msgpack.encode(state, enc_hook=encoded)),
    )
    (folder / _NAME).write_bytes(msgspec.msgpack.encode(file))


def read_sampler_state(folder: Path) -> SamplerState:
    """Return the state in a checkpoint's folder; raises ConfigError if it cannot be read."""
    path = folder / _OLD_NAME
    try:
        if path.is_file():
            return _old_state(path.read_bytes())
        path = folder / _NAME
        return _state(_FILE.decode(path.read_bytes()))
    except (OSError, msgspec.MsgspecError, IndexError, KeyError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read as the state of a sampler ({error}); "
            "resume from another checkpoint"
        ) from None


def _state(file: _File) -> SamplerState:
    chains = linked(
        [_array("i", one.token_ids) for one in file.chains],
        [_array("f", one.logprobs) for one in file.chains],
        [one.parent for one in file.chains],
        [one.num_shared for one in file.chains],
    )
    for chain, saved in zip(chains, file.chains, strict=True):
        chain.own_routes, chain.routes_shape = bytearray(saved.routes), saved.routes_shape

    def chain_of(kind: type, value: Any) -> TokenChain:
        assert kind is TokenChain, f"{kind} is not saved with the sampler's state"
        return chains[value]

    return msgspec.msgpack.decode(file.state, type=SamplerState, dec_hook=chain_of)


def _array(code: str, content: bytes) -> "array[Any]":
    found = array(code)
    found.frombytes(content)
    return found


def _old_state(content: bytes) -> SamplerState:
    fields = msgspec.json.decode(content)
    for batch in fields["batches"].values():
        for group in (*batch["groups"], *batch["rejected"]):
            for rollout in group["rollouts"]:
                _move_tokens(rollout["turns"])
    return msgspec.convert(fields, SamplerState, str_keys=True, from_attributes=True)


def _move_tokens(turns: list[dict[str, Any]]) -> None:
    """Replace the tokens of each turn by its place in a chain."""
    columns = [[turn["completion"].pop(name) for turn in turns] for name in PER_TURN]
    for turn, tokens in zip(turns, tokens_of_turns(*columns), strict=True):
        turn["completion"]["tokens"] = tokens
