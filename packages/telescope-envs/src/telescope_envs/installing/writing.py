"""Writes an environment's wheel into a site-packages, from the bytes that inspection has held.

No other program unpacks the wheel. So what is installed is what was inspected, whatever another
reader would have made of the same archive.
"""

import csv
import io
import os
from pathlib import Path

from telescope_core.errors import EnvironmentLoadError
from telescope_envs.registry.wheel import WheelContents, record_hash

_INSTALLER = "telescope\n"


def write_wheel(contents: WheelContents, site_packages: Path) -> None:
    """Write every file of an inspected wheel, and its RECORD.

    Raises EnvironmentLoadError, before anything is written, if another package has one of them.
    """
    info = f"{contents.module}-{contents.version}.dist-info"
    files = {path: data for path, data in contents.files.items() if path != f"{info}/RECORD"}
    files[f"{info}/INSTALLER"] = _INSTALLER.encode()
    files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD")
    for path in files:
        if (site_packages / path).exists() or (site_packages / path).is_symlink():
            raise EnvironmentLoadError(
                f"{contents.distribution} {contents.version}: {site_packages / path} is there "
                "already, and belongs to something else; remove it and install again"
            )
    # What describes the package comes first, with the list of its files: if this process is killed
    # in between, the next installation can remove what there is.
    for path, data in sorted(files.items(), key=lambda one: not one[0].startswith(f"{info}/")):
        target = site_packages / path
        target.parent.mkdir(parents=True, exist_ok=True)
        # "x": nothing may have appeared there in between, a link to another place least of all.
        with target.open("xb") as file:
            file.write(data)
        os.chmod(target, 0o644)


def _record(files: dict[str, bytes], own: str) -> bytes:
    table = io.StringIO()
    rows = csv.writer(table, lineterminator="\n")
    for path, data in sorted(files.items()):
        rows.writerow([path, record_hash(data), len(data)])
    rows.writerow([own, "", ""])
    return table.getvalue().encode()
