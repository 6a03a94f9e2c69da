"""Known agent programs, unmodified, in sandboxes: trained on exactly what was sampled, and scored.

The sandboxes are local ones, and containers of a podman whose image has the program.

Their packages are installed as a user installs them. The model is scripted, in real tokens.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.asking import ask
from tests.core.sandboxes.containers import AGENT_PYTHON, IMAGE, podman_service

from telescope_core import Example, ListSource, RolloutStatus, Sampling, StopReason, reward, setup
from telescope_core.chat.client import ChatClient
from telescope_core.errors import EnvironmentLoadError
from telescope_core.gateway import Gateway, RecordedEnvironment, forwarding
from telescope_core.harnesses import AgentConfig, AgentEnvironment, open_harness
from telescope_core.harnesses.installed import (
    COMPLETE,
    VARIABLE,
    require_installed,
    require_readable,
)
from telescope_core.in_process import InProcessEnvironment
from telescope_core.sandboxes import open_provider
from telescope_core.sandboxes.local.interpreter import find_interpreter
from telescope_train.batches.samples import samples_from_rollout
from telescope_train.inference.policy import TokenPolicySource

sys.path.insert(0, str(Path(__file__).parents[1] / "train" / "gateway"))
from scripted_pool import ScriptedPool, make_renderer

pytestmark = pytest.mark.engine

SAMPLING = Sampling(max_tokens=400, temperature=0.9)
LIMIT_S = 300.0
TASK = "The tests of price.py fail. Mend it."
WRONG = "def total(prices):\n    return sum(prices[1:])\n"
MENDS = ["cat price.py", "sed -i 's/prices.1:./prices/' price.py"]
NUM_SAMPLES = {"mini-swe-agent": 1, "openai-agents": 3}
"""Program -> training samples of a rollout of three turns with thinking."""
TOOL = {"mini-swe-agent": "bash", "openai-agents": "shell"}
ENDS = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo mended"


class Mending(AgentEnvironment):
    """A planted bug, which a hidden check finds after the program has ended."""

    harness = "mini-swe-agent"

    def examples(self, split):
        return ListSource([Example(id="price", prompt=TASK)])

    @setup
    async def put_project(self, episode):
        box = await self.sandbox(episode)
        await box.write("price.py", WRONG.encode())
        # Where commands start; it must not be imported in place of the program's own module.
        await box.write("json.py", b"raise ImportError('of the project')")

    @reward
    async def passes(self, episode):
        box = await self.sandbox(episode)
        check = "import price; print(price.total([1, 2, 4]))"
        return float((await box.run(["python3", "-c", check])).text == "7\n")


class MendingInContainer(Mending):
    """The same in containers, whose image has the program's packages."""

    agent_python = AGENT_PYTHON
    address = ""

    def provider(self):
        return open_provider("docker", base_url=self.address, image=IMAGE)


def packages_of(name: str) -> Path:
    return require_installed(open_harness(name), find_interpreter().path)


@contextmanager
def readable_folder() -> Iterator[Path]:
    """Yield a folder that stays for the next session, or else one that sandboxes can read."""
    place = Path(sys.prefix, "harnesses")
    with tempfile.TemporaryDirectory(prefix="agents-") as folder:
        try:
            require_readable(place)
        except EnvironmentLoadError:
            # Not in one of pytest's, which every session of pytest closes again.
            place = Path(folder)
            place.chmod(0o755)
        yield place


@pytest.fixture(scope="module")
def agents() -> Iterator[None]:
    """Install the programs as a user does."""
    with readable_folder() as place, pytest.MonkeyPatch.context() as patched:
        patched.setenv(VARIABLE, str(place))
        code = "from telescope_cli.main import main; main()"
        words = [sys.executable, "-c", code, "agent", "install"]
        installing = [subprocess.Popen([*words, name]) for name in TOOL]
        assert [one.wait(timeout=600) for one in installing] == [0] * len(TOOL)
        yield


@pytest.fixture(scope="module")
def in_container(agents) -> type[MendingInContainer]:
    """The environment with a podman of its own; the path of its socket must be short."""
    packages = packages_of("openai-agents")
    with (
        tempfile.TemporaryDirectory(prefix="podman-") as folder,
        podman_service(Path(folder), packages) as address,
    ):
        yield type("InContainer", (MendingInContainer,), {"address": address})


@pytest.fixture
async def gateway():
    made = Gateway(model="policy")
    await made.start()
    yield made
    await made.close()


def policy_of(name: str, gateway: Gateway):
    """Return a policy that mends the project with the tool of a program, and ends."""

    def call(command: str) -> str:
        asked = {"name": TOOL[name], "arguments": {"command": command}}
        return f"<tool_call>\n{json.dumps(asked)}\n</tool_call>"

    last = call(ENDS) if name == "mini-swe-agent" else "mended"
    turns = [*map(call, MENDS), last]

    def reply(prompt: str) -> str:
        return f"<think>step by step</think>{turns[min(prompt.count('<|tool|>'), 2)]}"

    renderer = make_renderer(keep_thinking=True)
    pool = ScriptedPool(renderer, reply)
    return TokenPolicySource(pool, renderer, max_model_len=None, gateway=gateway).policy(
        "0.0/0", SAMPLING
    )


@pytest.fixture
async def client(name, agents):
    made = InProcessEnvironment(Mending(AgentConfig(harness=name, max_turns=8)), name="mending")
    yield RecordedEnvironment(made)
    await made.close()


def require_mended(rollout) -> None:
    wrote = {note.key: note.value[-2000:] for note in rollout.info}
    assert rollout.status is RolloutStatus.KEPT, (rollout.error, wrote)
    assert (rollout.reward, rollout.stop_reason) == (1.0, StopReason.COMPLETED), wrote
    assert rollout.completion_text == "mended", wrote
    assert rollout.tags["agent_ended"] == "exit 0", wrote
    assert len(rollout.turns) == 3
    assert TASK in "".join(m.content for m in rollout.conversations[0])


async def require_trained(name, client, gateway) -> None:
    """Play a rollout; what is trained on is what was sampled, and no other token."""
    policy = policy_of(name, gateway)
    rollout = await client.play(ask(deadline_s=LIMIT_S, sampling=SAMPLING), policy)
    require_mended(rollout)
    samples = samples_from_rollout(rollout, 1.0, 1.0)
    assert len(samples) == NUM_SAMPLES[name]
    sampled = [turn.completion.completion_ids for turn in rollout.turns]
    assert sum(int(sample.mask.sum()) for sample in samples) == sum(map(len, sampled))
    trained = [one for sample in samples for one in sample.token_ids[sample.mask].tolist()]
    assert trained == [one for ids in sampled for one in ids]


@pytest.mark.parametrize("name", ["mini-swe-agent"])
async def test_its_rollout_is_trained_on_exactly_what_was_sampled(name, client, gateway):
    """The other program's are trained on in a container, and recorded in an eval here."""
    await require_trained(name, client, gateway)


async def test_in_a_container_it_is_trained_on_exactly_what_was_sampled(in_container, gateway):
    name = "openai-agents"
    made = InProcessEnvironment(
        in_container(AgentConfig(harness=name, max_turns=8)), name="mending"
    )
    client = RecordedEnvironment(made)
    await require_trained(name, client, gateway)
    await client.close()


def test_what_a_program_never_imports_is_not_installed(agents):
    pins = (packages_of("mini-swe-agent") / COMPLETE).read_text()
    assert "litellm==" in pins
    assert not {"datasets", "pyarrow", "boto3"} & {pin.split("==")[0] for pin in pins.split()}


@pytest.mark.parametrize("name", ["openai-agents"])
async def test_its_rollout_is_recorded_in_an_eval(name, client, gateway):
    behind = policy_of(name, gateway)
    served = behind.endpoint
    chat = ChatClient(served.base_url, served.model, api_key=served.api_key)
    async with forwarding(chat) as policies:
        policy = policies.policy("0/0", SAMPLING)
        rollout = await client.play(ask(deadline_s=LIMIT_S, sampling=SAMPLING), policy)
    await chat.close()
    require_mended(rollout)
    assert [turn.completion.num_prompt_tokens for turn in rollout.turns] == [
        len(turn.completion.prompt_ids) for turn in behind.turns
    ]
