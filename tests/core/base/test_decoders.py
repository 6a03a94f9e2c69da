"""Decoders of new classes that several threads build at once, in a process that may crash."""

import subprocess
import sys
import textwrap

import pytest

PROGRAM = textwrap.dedent(
    """
    import sys, threading
    import msgspec
    from telescope_core.base.decoders import convert, json_decoder

    sys.setswitchinterval(1e-6)
    CONTENT = b'{"f0": 1, "child": {"f1": 2, "child": {"f3": 4}}}'


    def new_kind(number):
        fields = "".join(f"    f{one}: int | None = None\\n" for one in range(12))
        source = "import msgspec\\n"
        for depth in range(4):
            child = f"    child: 'Kind{depth - 1} | None' = None\\n" if depth else ""
            source += f"class Kind{depth}(msgspec.Struct):\\n{fields}{child}"
        module = sys.modules[f"made{number}"] = type(sys)(f"made{number}")
        exec(source, vars(module))
        return module.Kind3


    def built(kind):
        return WAY(kind)


    wrong = []
    for number in range(200):
        kind, barrier = new_kind(number), threading.Barrier(3)

        def go():
            barrier.wait()
            try:
                assert built(kind).child.child.f3 == 4
            except Exception as error:
                wrong.append(repr(error))

        threads = [threading.Thread(target=go) for _ in range(3)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    print(wrong[:3])
    """
)
WAYS = {
    "decoder": "json_decoder(kind).decode(CONTENT)",
    "convert": "convert(msgspec.json.decode(CONTENT), kind)",
}


@pytest.mark.parametrize("way", WAYS)
def test_threads_that_meet_a_class_for_the_first_time_do_not_crash(way: str):
    program = PROGRAM.replace("WAY(kind)", WAYS[way])
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr[-2000:]
