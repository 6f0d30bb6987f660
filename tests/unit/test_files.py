"""Files: written as a whole or not at all, and read within bounds."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from autopar.cli.app import app
from autopar.errors import PlanError, SpecError
from autopar.report import build_report
from autopar.search.journal import Journal
from autopar.spec.cluster import ClusterSpec
from autopar.spec.files import read_file, write_file
from autopar.spec.plan import Plan
from tests.unit.plans import small_plan


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A folder with room for little: a file system of its own as root, else a limit on the size of files."""
    folder = tmp_path / "full"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(folder)], check=False, capture_output=True
    )
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if mounted.returncode:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 10, before[1]))
    try:
        yield folder
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        if not mounted.returncode:
            subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("plan.json", lambda path: small_plan(40).save(path)),
        ("report.html", lambda path: build_report(small_plan(), path)),
        ("any", lambda path: write_file(path, b"x" * (1 << 20))),
    ],
)
def test_on_a_full_disk_the_old_file_stays(full: Path, name: str, write: Callable[[Path], object]) -> None:
    path = full / name
    path.write_text("old")
    with pytest.raises(SpecError, match=rf"{name}: cannot write the \w+: (No space left on device|File too large)"):
        write(path)
    assert path.read_text() == "old"
    assert [p.name for p in full.iterdir()] == [name]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"plan.json: cannot write the plan: No such file or directory"):
        small_plan().save(tmp_path / "none" / "plan.json")


@pytest.mark.parametrize("path", ["/dev/full", "/none/journal.jsonl"])
def test_a_journal_that_cannot_be_written_names_the_file(path: str) -> None:
    with pytest.raises(SpecError, match=f"{path}: cannot write the journal: No s"), Journal(path):
        raise AssertionError("it was opened")


def test_a_folder_in_its_place(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot write the file: Is a directory"):
        write_file(tmp_path, "x")


def test_permissions_are_those_of_a_new_file_or_of_the_old_one(tmp_path: Path) -> None:
    path, plain = tmp_path / "a", tmp_path / "plain"
    plain.touch()
    write_file(path, "one")
    assert path.stat().st_mode == plain.stat().st_mode
    path.chmod(0o640)
    write_file(path, "two")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("two", 0o640)


def test_a_link_goes_on_to_point_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    write_file(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "new"


def test_a_device_is_written_to_and_not_replaced() -> None:
    write_file("/dev/null", "x")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(SpecError, match="/dev/full: cannot write the report: No space left on device"):
        write_file("/dev/full", "x" * 100_000, "report")


def _pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def _holding(data: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / "file").write_bytes(data)
        return folder / "file"

    return make


PLAN = small_plan().model_dump_json()
UNREADABLE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a pipe": (_pipe, "it is a pipe, not a file"),
    "a folder": (lambda folder: folder, "Is a directory"),
    "a device without end": (lambda _: Path("/dev/zero"), "it is a device, not a file"),
    "nothing": (lambda folder: folder / "none", "No such file"),
    "an empty file": (_holding(b""), "not JSON"),
    "bytes": (_holding(bytes(range(256))), "not UTF-8 text: byte 0x80"),
    "UTF-16": (_holding(PLAN.encode("utf-16")), "not UTF-8 text"),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_what_is_no_file_with_text_is_refused_at_once(tmp_path: Path, what: str) -> None:
    make, said = UNREADABLE[what]
    path = make(tmp_path)
    with pytest.raises(PlanError, match=said):
        Plan.load(path)
    with pytest.raises(SpecError, match=said if what != "an empty file" else "nothing in it"):
        ClusterSpec.load(path)
    for arguments in (["explain", str(path)], ["plan", "model.py:make", "--cluster", str(path)]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2 and "fault of autopar" not in result.output


def test_a_file_that_is_too_large(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 40)  # of holes
    with pytest.raises(PlanError, match="larger than 64 MiB: this is no plan"):
        Plan.load(tmp_path / "large")


def test_a_byte_order_mark_is_read_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_text(PLAN, encoding="utf-8-sig")
    assert Plan.load(tmp_path / "file") == small_plan()


def test_a_path_that_is_none() -> None:
    for use in (lambda: read_file("a\0b", "plan", 10), lambda: write_file("a\0b", "x")):
        with pytest.raises(SpecError, match="null byte"):
            use()


def test_an_output_that_is_full_is_no_fault_of_autopar(tmp_path: Path) -> None:
    small_plan().save(tmp_path / "plan.json")
    with Path("/dev/full").open("w") as out:
        found = subprocess.run(
            [sys.executable, "-m", "autopar", "explain", str(tmp_path / "plan.json")],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    assert found.returncode == 2
    assert found.stderr == "error: the output: cannot be written: No space left on device\n"
