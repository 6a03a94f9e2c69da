"""Token chains: every token that a rollout's requests saw, stored once.

A chain is one token sequence: prompts, each followed by the completion that was sampled for it. A
turn is a place in a chain. A prompt that begins with a whole chain extends it. Any other prompt
begins a new chain, which shares its first tokens with an earlier one if they are equal. Chains only
grow at their end, so a place in a chain keeps its tokens. For a mixture of experts, a chain may
record which experts computed its tokens. No I/O.
"""

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

_UNKNOWN = b"\xff"
"""The fill byte: two of them read as an int16 are -1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """The experts of a mixture-of-experts model that computed each token of a request."""

    experts: bytes
    """[T, layers, chosen] int16, little-endian; -1 = not known."""
    num_layers: int
    num_chosen: int
    """Experts that a token is sent to in a layer."""

    @property
    def num_bytes(self) -> int:
        """Size of the column."""
        return len(self.experts)


class TokenChain:
    """One token sequence, and the log-probs of the tokens in it that were sampled.

    It begins with the first `num_shared` tokens of `parent`, which are not stored again.
    """

    __slots__ = ("logprobs", "num_shared", "own_ids", "own_routes", "parent", "routes_shape")

    def __init__(
        self,
        own_ids: "array[int]",
        logprobs: "array[float]",
        *,
        parent: "TokenChain | None" = None,
        num_shared: int = 0,
    ) -> None:
        self.own_ids = own_ids
        """int32 ids behind the shared ones."""
        self.logprobs = logprobs
        """float32, nats: those of the completions in this chain, one after the other."""
        self.parent = parent
        self.num_shared = num_shared
        self.own_routes = bytearray()
        """[R, layers, chosen] int16 experts of the first R own tokens, little-endian. The token
        that was sampled last has none, because no server has computed it yet."""
        self.routes_shape: tuple[int, int] | None = None
        """Number of layers, and of experts per token in a layer; None = no routes."""

    def __len__(self) -> int:
        return self.num_shared + len(self.own_ids)

    def id_at(self, position: int) -> int:
        """Return the id at `position`."""
        chain = self
        while chain.parent is not None and position < chain.num_shared:
            chain = chain.parent
        return chain.own_ids[position - chain.num_shared]

    def token_ids(self, start: int, stop: int) -> "array[int]":
        """Return a copy of the ids from position `start` up to `stop`."""
        pieces: list[array[int]] = []
        chain: TokenChain | None = self
        while chain is not None and start < stop:
            first = chain.num_shared
            if stop > first:
                pieces.append(chain.own_ids[max(0, start - first) : stop - first])
            # The rest is in the shared beginning, at the same positions of the parent.
            stop = min(stop, first)
            chain = chain.parent
        if len(pieces) == 1:
            return pieces[0]
        ids = array("i")
        for piece in reversed(pieces):
            ids.extend(piece)
        return ids

    def learn_routes(self, said: Routes) -> None:
        """Store the routes of a request for those of its tokens that have none yet.

        So a token keeps the experts that computed it when what follows it was sampled.
        """
        shape = (said.num_layers, said.num_chosen)
        token_bytes = 2 * said.num_layers * said.num_chosen
        stop = len(self)
        for chain in self._line():
            if chain.routes_shape not in (None, shape):
                raise ValueError(
                    f"expected routes of {chain.routes_shape} layers and experts, as those of the "
                    f"tokens before, got {shape}; all servers must have the same model"
                )
            chain.routes_shape = shape
            known = chain.num_shared * token_bytes + len(chain.own_routes)
            chain.own_routes += said.experts[known : stop * token_bytes]
            # A parent may not know its last token, which this request computed as well.
            stop = min(stop, chain.num_shared)

    def routes_until(self, stop: int) -> Routes | None:
        """Return the routes of all tokens up to `stop`, a copy; None if there are none."""
        shapes = [one.routes_shape for one in self._line() if one.routes_shape is not None]
        if not shapes:
            return None
        num_layers, num_chosen = shapes[0]
        pieces: list[bytes] = []
        for chain in self._line():
            size = 2 * num_layers * num_chosen * max(0, stop - chain.num_shared)
            pieces.append(bytes(chain.own_routes[:size]).ljust(size, _UNKNOWN))
            stop = min(stop, chain.num_shared)
        experts = b"".join(reversed(pieces))
        return Routes(experts=experts, num_layers=num_layers, num_chosen=num_chosen)

    def _line(self) -> Iterator["TokenChain"]:
        """Yield this chain, its parent, and so on."""
        chain: TokenChain | None = self
        while chain is not None:
            yield chain
            chain = chain.parent


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledTokens:
    """One completion as a place in a chain. Two are equal if their tokens and log-probs are."""

    chain: TokenChain
    prompt_end: int
    """Position behind the prompt, which begins where the chain does."""
    completion_end: int
    """Position behind the completion, which begins where the prompt ends."""
    logprobs_start: int
    """Index in the log-probs of the chain."""
    logprobs_end: int

    @property
    def prompt_ids(self) -> "array[int]":
        """[P] int32, exactly as the server saw them; a copy."""
        return self.chain.token_ids(0, self.prompt_end)

    @property
    def completion_ids(self) -> "array[int]":
        """[C] int32, exactly as they were sampled; a copy."""
        return self.chain.token_ids(self.prompt_end, self.completion_end)

    @property
    def logprobs(self) -> "array[float]":
        """[C] float32, nats, of the distribution that was sampled from; a copy."""
        return self.chain.logprobs[self.logprobs_start : self.logprobs_end]

    @property
    def token_ids(self) -> "array[int]":
        """[P + C] prompt and completion; a copy."""
        return self.chain.token_ids(0, self.completion_end)

    @property
    def routes(self) -> Routes | None:
        """[P + C] the experts of each token, a copy; None = the server did not report them."""
        return self.chain.routes_until(self.completion_end)

    @property
    def last_id(self) -> int:
        """The last id of the completion, or of the prompt if nothing was sampled."""
        return self.chain.id_at(self.completion_end - 1)

    @property
    def num_completion_ids(self) -> int:
        """Number of tokens of the completion: the dimension C."""
        return self.completion_end - self.prompt_end

    @property
    def num_logprobs(self) -> int:
        """Number of log-probs: C, unless the server left some out."""
        return self.logprobs_end - self.logprobs_start

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SampledTokens):
            return NotImplemented
        return (
            (self.prompt_end, self.completion_end) == (other.prompt_end, other.completion_end)
            and self.token_ids == other.token_ids
            and self.logprobs == other.logprobs
        )

    __hash__ = None  # pyright: ignore[reportAssignmentType]


class ChainRecorder:
    """Puts the completions of one rollout into chains, in the order in which they ended."""

    def __init__(self) -> None:
        # Parents stand before their children.
        self._chains: list[TokenChain] = []
        self._temperatures: list[float | None] = []
        self._departures: list[int] = []
        """Number of each chain's own tokens that the last prompt had. The next departs there too
        as a rule, which spares the search."""

    def record(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        logprobs: Sequence[float],
        *,
        temperature: float | None = None,
        routes: Routes | None = None,
    ) -> SampledTokens:
        """Store a completion behind the longest chain that begins its prompt; return its place.

        A chain has one temperature, because a trainer divides all logits of a sequence by it.
        `routes`: those of the request, for the whole prompt and the tokens computed after it.
        """
        prompt = _int32(prompt_ids)
        common = self._num_common(prompt)
        whole = [
            number
            for number, chain in enumerate(self._chains)
            if common[number] == len(chain) and self._temperatures[number] == temperature
        ]
        if whole:
            chain = self._chains[max(whole, key=common.__getitem__)]
        else:
            chain = _branch(self._chains, common)
            self._chains.append(chain)
            self._temperatures.append(temperature)
            self._departures.append(0)
        chain.own_ids.extend(prompt[len(chain) :])
        place = _append(chain, completion_ids, logprobs)
        if routes is not None:
            chain.learn_routes(routes)
        return place

    def _num_common(self, prompt: "array[int]") -> list[int]:
        """Return how many tokens each chain has in common with `prompt`, from the beginning."""
        common: list[int] = []
        places = {id(chain): number for number, chain in enumerate(self._chains)}
        for number, chain in enumerate(self._chains):
            first = chain.num_shared
            known = common[places[id(chain.parent)]] if chain.parent is not None else 0
            # Where the prompt departs from the part that is shared, the rest need not be looked at.
            if known >= first:
                num_own = _num_equal(prompt, first, chain.own_ids, self._departures[number])
                self._departures[number] = num_own
                known = first + num_own
            common.append(known)
        return common


def sampled_tokens(
    prompt_ids: Sequence[int], completion_ids: Sequence[int], logprobs: Sequence[float]
) -> SampledTokens:
    """Return one completion in a chain of its own."""
    return _append(TokenChain(_int32(prompt_ids), array("f")), completion_ids, logprobs)


def chains_of(places: Iterable[SampledTokens | None]) -> list[TokenChain]:
    """Return the chains that hold `places`, each once, parents before their children."""
    found: dict[int, TokenChain] = {}
    for place in places:
        line: list[TokenChain] = []
        chain = place.chain if place is not None else None
        while chain is not None and id(chain) not in found:
            line.append(chain)
            chain = chain.parent
        found |= {id(one): one for one in reversed(line)}
    return list(found.values())


def _branch(chains: Sequence[TokenChain], common: Sequence[int]) -> TokenChain:
    """Return a new chain that shares the longest known beginning."""
    number = max(range(len(chains)), key=common.__getitem__, default=None)
    if number is None or not common[number]:
        return TokenChain(array("i"), array("f"))
    parent, num_shared = chains[number], common[number]
    # The chain that stores the last of these tokens, so that no chain in between is walked through.
    while parent.parent is not None and num_shared <= parent.num_shared:
        parent = parent.parent
    return TokenChain(array("i"), array("f"), parent=parent, num_shared=num_shared)


def _append(
    chain: TokenChain, completion_ids: Sequence[int], logprobs: Sequence[float]
) -> SampledTokens:
    prompt_end, logprobs_start = len(chain), len(chain.logprobs)
    chain.own_ids.extend(_int32(completion_ids))
    chain.logprobs.extend(array("f", logprobs))
    return SampledTokens(
        chain=chain,
        prompt_end=prompt_end,
        completion_end=len(chain),
        logprobs_start=logprobs_start,
        logprobs_end=len(chain.logprobs),
    )


def _num_equal(prompt: "array[int]", first: int, own_ids: "array[int]", guess: int) -> int:
    """Return how many tokens of `own_ids` stand in `prompt` from position `first` on."""
    low, high = 0, min(len(prompt) - first, len(own_ids))
    if guess < high and prompt[first + guess] != own_ids[guess]:
        high = guess
    if prompt[first : first + high] == own_ids[:high]:
        return high
    # Halving: below `low` they are equal, and somewhere below `high` they are not.
    while high - low > 1:
        middle = (low + high) // 2
        if prompt[first + low : first + middle] == own_ids[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _int32(token_ids: Sequence[int]) -> "array[int]":
    if isinstance(token_ids, array):
        return array("i", token_ids)
    # Twice as fast as an array that is made from the list.
    ids = array("i")
    try:
        ids.frombytes(struct.pack(f"{len(token_ids)}i", *token_ids))
    except struct.error as error:
        raise OverflowError(f"expected token ids of 32 bits: {error}") from None
    return ids
