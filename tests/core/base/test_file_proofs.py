"""Proofs of files, also of those that somebody removes meanwhile."""

from telescope_core.base import file_proofs


def test_a_file_that_vanishes_while_it_is_read_is_missing(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"1")
    proofs = file_proofs.proofs_of(tmp_path, {})
    then = file_proofs.proof_of

    def removing(path, moved=None):
        path.unlink()
        return then(path, moved)

    monkeypatch.setattr(file_proofs, "proof_of", removing)
    assert file_proofs.wrong_contents(tmp_path, proofs, ["a"]) == ["a is missing"]
