"""Checks the names in a registry for duplicates, reserved names and dangling aliases."""

from collections.abc import Iterator

from packaging.requirements import Requirement

from telescope_envs.registry.check_tree import IndexLine, Tree
from telescope_envs.registry.findings import Finding
from telescope_envs.registry.names import distribution_name, module_name, parse_reserved, plain


def check_names(tree: Tree) -> list[Finding]:
    """Return what is wrong with the names of owners, environments, aliases and requirements."""
    findings = [*_same_names(tree), *_reserved_names(tree), *_lost_aliases(tree)]
    for lines in tree.releases.values():
        for line in lines:
            findings += [*_wrong_distribution(line), *_wrong_requirements(line)]
    return findings


def _same_names(tree: Tree) -> Iterator[Finding]:
    seen: dict[str, str] = {}
    for environment_id in tree.releases:
        distribution = plain(distribution_name(*environment_id.split("/")))
        first = seen.setdefault(distribution, environment_id)
        if first != environment_id:
            yield Finding(
                check="unique-name",
                where=f"index/{environment_id}.jsonl",
                what=f"has the distribution name {distribution}, which {first} has as well",
                fix="publish the later one under another name",
            )


def _reserved_names(tree: Tree) -> Iterator[Finding]:
    if tree.config is None:
        return  # without the config it is unknown which owner is the registry's own
    reserved = parse_reserved(tree.bytes_of("reserved.txt")) - {tree.config.name}
    used = [(f"index/{name}.jsonl", part) for name in tree.releases for part in name.split("/")]
    used += [("aliases.toml", alias) for alias in tree.aliases]
    for where, name in dict.fromkeys(used):
        if plain(name) in reserved:
            yield Finding(
                check="reserved-name",
                where=where,
                what=f"{name!r} is a reserved name",
                fix="choose another name, or remove it from reserved.txt if it may be used",
            )


def _lost_aliases(tree: Tree) -> Iterator[Finding]:
    for alias, environment_id in tree.aliases.items():
        if environment_id not in tree.releases:
            yield Finding(
                check="alias",
                where="aliases.toml",
                what=f"{alias!r} points to {environment_id!r}, which is not in the index",
                fix="correct the name, or publish that environment first",
            )


def _wrong_distribution(line: IndexLine) -> Iterator[Finding]:
    release = line.release
    module = module_name(release.owner, release.name)
    expected = {
        "distribution": (distribution_name(release.owner, release.name), release.distribution),
        "module": (module, release.module),
        "wheel.filename": (
            f"{module}-{release.version}-py3-none-any.whl",
            release.wheel.filename,
        ),
    }
    for name, (wanted, got) in expected.items():
        if wanted != got:
            yield Finding(
                check="index-line",
                where=line.where,
                what=f"{name} is {got!r}, not {wanted!r}",
                fix="restore the line from the git history, or correct it before it is committed",
            )


def _wrong_requirements(line: IndexLine) -> Iterator[Finding]:
    for text in line.release.requires_dist:
        problem = _problem(text)
        if problem:
            yield Finding(
                check="requirement",
                where=line.where,
                what=f"requires {text!r}: {problem}",
                fix="publish a new version without it, and yank this one",
            )


def _problem(text: str) -> str:
    try:
        requirement = Requirement(text)
    except (ValueError, RecursionError):
        return "not a valid requirement (PEP 508)"
    if requirement.url:
        return "a URL, not a package from the package index"
    if plain(requirement.name).startswith("telescope-env-"):
        return "another environment, which is not in the package index"
    return ""
