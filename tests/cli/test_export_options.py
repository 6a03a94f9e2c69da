"""Options of `telescope export` that cannot be: refused before anything is read or loaded."""

import pytest

from telescope_cli.main import main


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["--dtype", "int3"], ["--dtype", "float32, bfloat16", "'int3'"]),
        (["--max-shard-size", "five"], ["--max-shard-size", "KB, MB", "'five'"]),
        (["--max-shard-size", "0GB"], ["--max-shard-size", "'0GB'"]),
        (["--private"], ["--private", "--push OWNER/NAME"]),
        (["--push", "mine"], ["--push", "OWNER/NAME", "'mine'"]),
    ],
)
def test_an_option_that_cannot_be_is_refused_with_its_name(tmp_path, capsys, arguments, facts):
    with pytest.raises(SystemExit) as ended:
        main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "out"), *arguments])
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    assert all(fact in said.err for fact in facts)
    assert list(tmp_path.iterdir()) == []
