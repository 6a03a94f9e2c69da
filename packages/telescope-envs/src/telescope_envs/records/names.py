"""Rules for names and versions: permitted, equivalent and confusingly similar ones.

Pure functions over text. The registry's `namespaces/` says who may use an owner name, and its
`reserved.txt` lists the names that nobody may use.
"""

import re
from collections.abc import Iterable

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from telescope_core.base.errors import ConfigError

FORMAT_VERSION = 1
"""Version of the record format: the newest that this package reads, and the one it writes."""
ENTRY_POINT_GROUP = "telescope.environments"
"""Entry point group in which a wheel names its environment."""
WORDS = r"^[a-z0-9]+(-[a-z0-9]+)*$"
"""Words of lower-case letters and digits, joined by single hyphens."""
LONGEST_TEXT = 1000
"""Most characters of any text in a record."""
LARGEST_COUNT = 2**63 - 1
MAX_REQUIREMENTS = 1000
"""Most requirements of a release: checking each takes a while."""
FILE_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.+-]*$"
OWNER_LENGTHS = (3, 39)
NAME_LENGTHS = (2, 64)
_LOOKALIKES = (("rn", "m"), ("vv", "w"), ("0", "o"), ("1", "l"), ("i", "l"), ("5", "s"), ("-", ""))


def check_owner(owner: str) -> str:
    """Return `owner`; raises ConfigError when it cannot be the name of an owner."""
    return _check("owner", owner, OWNER_LENGTHS)


def check_name(name: str) -> str:
    """Return `name`; raises ConfigError when it cannot be the name of an environment."""
    return _check("environment name", name, NAME_LENGTHS)


def check_version(version: str) -> str:
    """Return `version`; raises ConfigError unless it is canonical PEP 440, not local, no epoch.

    Otherwise two spellings of the same version could be published as two releases.
    """
    try:
        parsed = Version(version)
    except ValueError:
        raise ConfigError(
            f"version {version[:80]!r} is not a PEP 440 version; write for instance 0.1.0 or "
            "1.0.0rc1"
        ) from None
    canonical = parsed.public.rpartition("!")[2]
    if parsed.local is not None or parsed.epoch or canonical != version:
        raise ConfigError(
            f"version {version!r} must be written {canonical!r}: normalized, without a local part "
            "and without an epoch"
        )
    return version


def check_specifier(text: str) -> str:
    """Return `text`; raises ValueError if it is not a range of Python versions."""
    try:
        found = SpecifierSet(text)
        if text and not all(map(str.strip, text.split(","))):
            # Packaging passes over it, and uv does not.
            raise ValueError(f"nothing stands beside a comma in {text!r}")
        found.contains("3.11")  # which fails for numbers that are too long to read
        _require_versions(found)
    except ValueError as error:
        raise ValueError(f"{str(error)[:80]}; write for instance '>=3.11'") from None
    return text


def check_requirement(text: str) -> str:
    """Return `text`; raises ValueError if it is not a requirement (PEP 508)."""
    try:
        requirement = Requirement(text)
        # A name that ends in a line or a dot is one to packaging, and none to uv.
        for name in (requirement.name, *requirement.extras):
            canonicalize_name(name, validate=True)
        _require_versions(requirement.specifier)
        marker = requirement.marker
        _ = marker is None or marker.evaluate({"extra": ""})
    except (ValueError, RecursionError):
        raise ValueError(f"{text[:80]!r} is not a requirement (PEP 508)") from None
    return text


def check_variable(text: str) -> str:
    """Return `text`; raises ValueError when it cannot be the name of an environment variable."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text):
        raise ValueError(f"is not the name of an environment variable: {text[:80]!r}")
    return text


def _require_versions(specifiers: SpecifierSet) -> None:
    """Raise ValueError for `===banana`: packaging takes any text behind `===`, and uv does not."""
    for specifier in specifiers:
        if specifier.operator == "===":
            Version(specifier.version)


def is_commit(revision: str) -> bool:
    """Return whether `revision` is a full commit digest, which can mean nothing else."""
    return re.fullmatch(r"[0-9a-f]{40}", revision) is not None


def is_version(version: str) -> bool:
    """Return whether `check_version` accepts it."""
    try:
        return bool(check_version(version))
    except ConfigError:
        return False


def distribution_name(owner: str, name: str) -> str:
    """Return the distribution name that an environment must be published under."""
    return f"telescope-env-{owner}-{name}"


def module_name(owner: str, name: str) -> str:
    """Return the name of the only import package that its wheel may contain."""
    return distribution_name(owner, name).replace("-", "_")


def split_distribution(distribution: str, owner: str) -> str:
    """Return the environment's name in `distribution`, which must belong to `owner`."""
    prefix = distribution_name(owner, "")
    if not distribution.startswith(prefix) or distribution == prefix:
        raise ConfigError(
            f"distribution {distribution!r} must be named {prefix}<name> to be published by "
            f"{owner!r}; rename it in its pyproject.toml"
        )
    return distribution.removeprefix(prefix)


def id_in_distribution(distribution: str, name: str) -> str:
    """Return owner/name if `distribution` is that of an environment `name`; else empty."""
    owner = distribution.removeprefix(distribution_name("", "")[:-1]).removesuffix(f"-{name}")
    return f"{owner}/{name}" if distribution == distribution_name(owner, name) else ""


def same_distribution_ids(environment_id: str) -> list[str]:
    """Return the other owner/name pairs whose distribution and module would be the same.

    Owner and name are joined with a hyphen, so `a-b/c` and `a/b-c` would be the same package.
    """
    parts = environment_id.replace("/", "-").split("-")
    pairs = ("-".join(parts[:cut]) + "/" + "-".join(parts[cut:]) for cut in range(1, len(parts)))
    return [pair for pair in pairs if pair != environment_id]


def parse_reserved(data: bytes | str) -> frozenset[str]:
    """Return the names in a `reserved.txt`: one per line; `#` begins a comment."""
    text = data if isinstance(data, str) else data.decode(errors="replace")
    text = text.removeprefix("\ufeff")  # a byte order mark, which would hide the first name
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return frozenset(canonicalize_name(line) for line in lines if line)


def near_names(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names that a person may confuse with `name`, but not `name` itself.

    These differ by one inserted, deleted or replaced letter, by a swap of neighboring letters, or
    by letters that look alike (l and 1, o and 0, m and rn). Compare bare names with bare names, and
    owners with owners.
    """
    skeleton = _skeleton(name)
    return sorted(
        other
        for other in set(known)
        if other != name and (_skeleton(other) == skeleton or is_one_edit(name, other))
    )


def is_one_edit(one: str, other: str) -> bool:
    """Return whether one insertion, deletion, replacement or adjacent swap makes them equal."""
    if abs(len(one) - len(other)) > 1 or one == other:
        return False
    differences = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    first = next(differences, min(len(one), len(other)))
    rest_one, rest_other = one[first:], other[first:]
    if len(one) != len(other):
        return rest_one[1:] == rest_other or rest_one == rest_other[1:]
    is_swap = rest_one[:2] == rest_other[1::-1] and rest_one[2:] == rest_other[2:]
    return is_swap or rest_one[1:] == rest_other[1:]


def _skeleton(name: str) -> str:
    for pair, looks_like in _LOOKALIKES:
        name = name.replace(pair, looks_like)
    return name


def _check(kind: str, text: str, lengths: tuple[int, int]) -> str:
    shortest, longest = lengths
    if not shortest <= len(text) <= longest or not re.fullmatch(WORDS, text):
        raise ConfigError(
            f"{kind} {text!r} must have {shortest} to {longest} characters: words of lower-case "
            "letters and digits, joined by single hyphens"
        )
    return text
