"""What stands at a path decides whether it is written; an error of the system ends as a message with the right exit code."""

import errno
import io
import os
import stat
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from dist_transformer import files
from dist_transformer.cli import demo
from dist_transformer.cli.demo import remove_former_run
from dist_transformer.cli.main import run_as_command
from dist_transformer.errors import EXIT_FAILED, EXIT_USER_ERROR, MachineError, UserError
from dist_transformer.files import closed_by, patiently, replacing, write_text
from dist_transformer.run.folder import RunDir
from dist_transformer.run.lock import RunLock
from dist_transformer.run.outputs import as_message, check_output, check_run_folder, is_stream, write_output, writing

OF_PATHS = ("ENOENT", "EACCES", "EPERM", "ENAMETOOLONG", "ELOOP", "ENOTDIR", "EISDIR", "EROFS", "EEXIST", "ENOTEMPTY")
OF_MACHINES = ("EIO", "ESTALE", "ENOSPC", "EDQUOT", "ETIMEDOUT", "EMFILE", "ENFILE", "ENOMEM", "EAGAIN", "ENOTCONN")


def of_system(name: str, path: Path) -> OSError:
    return OSError(getattr(errno, name), os.strerror(getattr(errno, name)), str(path))


@pytest.mark.parametrize(
    ("names", "code"), [(OF_PATHS, EXIT_USER_ERROR), (OF_MACHINES, EXIT_FAILED)], ids=["paths", "machines"]
)
def test_an_error_that_names_a_file_is_a_message_and_its_kind_decides_the_exit_code(
    names: tuple[str, ...],
    code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)  # left by a group in this process: a rank would end it at once
    for name in names:

        def fail(name: str = name) -> None:
            raise of_system(name, tmp_path / "file")

        with pytest.raises(SystemExit) as end:
            run_as_command(fail)
        assert end.value.code == code, name
        said = capsys.readouterr().err
        assert said.startswith(f"dist-transformer: {tmp_path}/file: {os.strerror(getattr(errno, name))}: ")
        assert said.count("\n") == 1


@pytest.mark.parametrize("name", ["EIO", "ESTALE", "ETIMEDOUT", "EPERM"])
def test_an_error_of_a_read_that_names_no_file_is_the_machine_s_and_keeps_what_was_printed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)

    def fail() -> None:
        print("before")
        raise OSError(getattr(errno, name), os.strerror(getattr(errno, name)))

    with (tmp_path / "printed").open("w") as printed, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", printed)
        with pytest.raises(SystemExit) as end:
            run_as_command(fail)
    assert end.value.code == EXIT_FAILED
    told = f"dist-transformer: {os.strerror(getattr(errno, name))}: a fault of the disk or of the machine; start again"
    assert capsys.readouterr().err.startswith(told)
    assert (tmp_path / "printed").read_text() == "before\n"


def test_a_standard_output_that_takes_nothing_is_told_and_discarded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with Path("/dev/full").open("w") as full, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as end:
            run_as_command(lambda: print("a line", flush=True))
    assert end.value.code == EXIT_FAILED
    told = "dist-transformer: No space left on device: make room and start again\n"
    assert capsys.readouterr().err == told


def test_an_error_of_a_relative_path_is_told_with_the_path_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for names, kind in ((OF_PATHS, UserError), (OF_MACHINES, MachineError)):
        for name in names:
            with pytest.raises(UserError, match=r"^out/page: cannot be written") as told, writing(Path("out/page")):
                raise of_system(name, tmp_path / "out")
            assert type(told.value) is kind, name
    with pytest.raises(OSError, match="elsewhere"), writing(Path("out/page")):
        raise of_system("EACCES", Path("/elsewhere/source"))


def test_what_is_free_is_a_new_path_an_empty_folder_and_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nothing")
    for name in ("new", "new/below", "dangling"):
        check_output(tmp_path / name, "a page", is_file=True)
        check_output(tmp_path / name, "a model folder")
    check_output(tmp_path / "file", "a page", is_file=True)
    check_output(tmp_path / "folder", "a model folder")
    for name in ("folder", "file"):
        with pytest.raises(UserError, match=f"{name}: is there already"):
            check_output(tmp_path / name, "another kind", is_file=name == "folder")
    (tmp_path / "folder" / "hidden").mkdir()
    (tmp_path / "file").write_text("text")
    for name in ("folder", "file"):
        with pytest.raises(UserError, match=f"{name}: is there already"):
            check_output(tmp_path / name, "a page")
        check_output(tmp_path / name, "a page", lambda path: path.exists())
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "file", "dangling"}


def killed_while_writing(path: Path) -> Path:
    """Leaves what a process leaves that is killed before its file has its name; returns that."""
    with replacing(path) as temporary:
        temporary.touch()
        kept = temporary.rename(path.with_name("kept"))
        temporary.touch()
    path.unlink()
    return kept.rename(temporary)


def test_a_folder_with_nothing_but_what_a_kill_has_left_of_its_first_file_is_free(tmp_path: Path) -> None:
    killed_while_writing(tmp_path / "out" / "node.json")
    killed_while_writing(tmp_path / "out" / ".hidden")
    check_output(tmp_path / "out", "a prepared corpus")
    for name in (".mine.tmp", ".mine.77.tmp", "mine.1.2.tmp", ".mine.1.2.tmp.txt"):
        (tmp_path / "out" / name).touch()
        with pytest.raises(UserError, match="out: is there already"):
            check_output(tmp_path / "out", "a prepared corpus")
        (tmp_path / "out" / name).unlink()


def test_a_demo_that_ended_before_its_run_had_settings_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Begun(Exception):
        pass

    def begin(_: RunDir) -> None:
        raise Begun

    monkeypatch.setattr(demo, "remove_former_run", begin)
    run_dir = RunDir(tmp_path / "demo-tour")
    for path in (run_dir.lock, run_dir.log, run_dir.state, run_dir.history):  # of a start that failed
        write_text(path, "text")
    killed_while_writing(run_dir.owner)
    killed_while_writing(run_dir.config)
    with pytest.raises(Begun):
        demo.demo_command(tmp_path)
    write_text(run_dir.path / "thesis.txt", "text")
    with pytest.raises(UserError, match="demo-tour: is there already"):
        demo.demo_command(tmp_path)


def test_a_page_goes_through_a_link_and_into_an_open_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("page")
    write_output(tmp_path / "link", "one")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "page").read_text() == "one"
    with (tmp_path / "open").open("w") as file:
        open_already = Path(f"/dev/fd/{file.fileno()}")
        assert is_stream(open_already)
        write_output(open_already, "two")
        assert os.fstat(file.fileno()).st_ino == (tmp_path / "open").stat().st_ino, "not replaced"
    assert (tmp_path / "open").read_text() == "two"


def test_a_file_in_the_place_of_the_checkpoints_is_told_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("x")
    with pytest.raises(UserError, match="checkpoints: is a file, expected the folder"):
        check_run_folder(RunDir(tmp_path))


CONTINUED = ("checkpoints", "train.log", "audit.jsonl",
             "metrics.jsonl", "samples.jsonl", "history.jsonl", "tracking_events.jsonl")  # fmt: skip
"""Records and the folder that a start continues in place; other files are replaced, for which the run folder must be open."""


@pytest.mark.parametrize("name", CONTINUED)
def test_what_another_user_has_closed_of_a_run_is_told_before_the_first_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, closed = RunDir(tmp_path), tmp_path / name
    run_dir.checkpoints.mkdir()
    for path in (run_dir.state, *(tmp_path / each for each in CONTINUED[1:])):
        path.write_text('{"state": "running"}\n')
    check_run_folder(run_dir)
    monkeypatch.setattr(os, "access", lambda path, mode: path != closed)
    with pytest.raises(UserError, match=rf"{name}: cannot be written .*Permission denied.*give another$") as told:
        check_run_folder(run_dir)
    assert told.value.exit_code == EXIT_USER_ERROR
    owner = closed.owner()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UserError, match=rf"{name} belongs to {owner}: ask for access \(chmod\), copy it"):
        check_run_folder(run_dir)


def test_an_output_whose_label_another_user_has_closed_is_told_as_closed_and_not_as_foreign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("README.md", "config.json"):
        (tmp_path / name).write_text("{}")
    owner = tmp_path.owner()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "config.json")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UserError, match=rf"config.json belongs to {owner}: ask for access \(chmod\)"):
        check_output(tmp_path, "a model folder", lambda path: False)
    with pytest.raises(UserError, match="is there already"):
        check_output(tmp_path, "a folder that is new in any case")
    with pytest.raises(UserError, match="is there already"):
        check_output(tmp_path, "a report", lambda path: False, is_file=True)


def test_a_link_to_nowhere_is_no_file_that_another_user_has_closed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(UserError, match="is there already"):
        check_output(tmp_path, "a model folder", lambda path: False)


def test_a_closed_path_is_told_with_its_owner_or_that_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(files, "PAUSES_SECONDS", ())
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    for name in ("EACCES", "EPERM"):
        below = tmp_path / "closed" / "folder" / "file"  # nothing below a closed folder can be seen
        for path, named in ((tmp_path / "file", tmp_path / "file"), (tmp_path / "new", tmp_path), (below, tmp_path)):
            said = f"{os.strerror(getattr(errno, name))}: {named} belongs to {tmp_path.owner()}: ask for access"
            assert str(as_message(of_system(name, path))).startswith(f"{path}: {said}")
            assert closed_by(of_system(name, path)).startswith(f"{named} belongs to")
            with pytest.raises(MachineError, match=rf"cannot be read now .* attempts\. {named} belongs to"):
                patiently(path, Mock(side_effect=of_system(name, path)))
    assert closed_by(of_system("ENOENT", tmp_path / "file")) == ""
    assert closed_by(OSError(errno.EACCES, "Permission denied")) == ""


def test_of_a_copy_onto_a_full_disk_its_target_is_told() -> None:
    """As shutil.copy raises it: with both names."""
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run/source.model", None, "other/export/source.model")
    with (
        pytest.raises(MachineError, match=r"^other/export: cannot be written .* make room"),
        writing(Path("other/export")),
    ):
        raise error


@pytest.mark.parametrize("error", [UserError("mine"), of_system("EISDIR", Path("a"))], ids=str)
def test_a_full_standard_error_keeps_the_exit_code(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)

    def fail() -> None:
        raise error

    with Path("/dev/full").open("wb", buffering=0) as full, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", io.TextIOWrapper(full, write_through=True))
        with pytest.raises(SystemExit) as end:
            run_as_command(fail)
    assert end.value.code == EXIT_USER_ERROR


def test_a_current_folder_that_was_removed_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(SystemExit) as end:
        run_as_command(os.getcwd)
    assert end.value.code == EXIT_USER_ERROR
    assert "the current folder: No such file or directory: expected a path that exists" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["owner.json", "report.html", "plugin.py", "stop", "metrics.jsonl"])
def test_a_file_of_a_user_with_the_name_of_one_that_a_run_replaces_or_deletes_is_kept(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(UserError, match=f"holds {name}, but is no run folder"):
        check_run_folder(RunDir(tmp_path))
    (tmp_path / name).unlink()
    lock = RunLock(RunDir(tmp_path))  # of a start that was killed before it had written more
    lock.acquire()
    check_run_folder(RunDir(tmp_path))
    lock.release()


def test_a_folder_of_the_demo_that_is_a_link_is_no_more_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    write_text(tmp_path / "disk" / "step_1" / "manifest.json", "text")
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    run_dir.checkpoints.symlink_to(tmp_path / "disk")
    remove_former_run(run_dir)
    assert list(run_dir.path.iterdir()) == []
    assert (tmp_path / "disk" / "step_1" / "manifest.json").is_file()


@pytest.mark.parametrize(
    "name", ["x" * 255, "ü" * 127, os.fsdecode(b"\xe4" * 255)], ids=["ASCII", "UTF-8", "other bytes"]
)
def test_the_longest_name_of_a_file_is_written(name: str, tmp_path: Path) -> None:
    write_text(tmp_path / name, "text")
    assert [(path.name, path.read_text(encoding="utf-8")) for path in tmp_path.iterdir()] == [(name, "text")]


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o444])
def test_a_file_that_is_replaced_keeps_its_permissions(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "translation"
    path.write_text("first")
    path.chmod(mode)
    write_output(path, "second")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("second", mode)


def test_a_file_that_is_replaced_keeps_its_group_and_no_right_to_act_as_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rights of a group are those of another one, in a folder that does not hand its group down."""
    path, given = tmp_path / "translation", []
    path.write_text("first")
    path.chmod(0o4770)
    monkeypatch.setattr(os, "chown", lambda at, user, group: given.append((Path(at).parent, user, group)))
    write_output(path, "second")
    assert given == [(tmp_path, -1, path.stat().st_gid)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o770

    def refused(*_: object) -> None:
        raise of_system("EPERM", path)

    path.chmod(0o600)
    monkeypatch.setattr(os, "chown", refused)
    write_output(path, "third")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("third", 0o600)


@pytest.mark.parametrize("name", ["EDQUOT", "EIO"])
def test_an_error_of_a_write_is_told_with_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Only that of an opening names a file by itself."""
    monkeypatch.delenv("RANK", raising=False)

    def full(_: int) -> None:
        raise OSError(getattr(errno, name), os.strerror(getattr(errno, name)))

    def write() -> None:
        with replacing(tmp_path / "out") as temporary:
            temporary.write_text("text")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SystemExit) as end:
        run_as_command(write)
    assert end.value.code == EXIT_FAILED
    said = capsys.readouterr().err
    advice = "make room" if name == "EDQUOT" else "a fault of the disk"
    assert said.startswith(f"dist-transformer: {tmp_path}/out: {os.strerror(getattr(errno, name))}: {advice}")
    assert not list(tmp_path.iterdir())


def test_a_disk_that_flushes_no_folders_takes_files_and_its_refusal_of_a_file_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = [stat.S_IFDIR]

    def fsync(descriptor: int) -> None:
        if stat.S_IFMT(os.fstat(descriptor).st_mode) in refused:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", fsync)
    write_text(tmp_path / "a", "first")
    assert (tmp_path / "a").read_text() == "first"
    refused[:] = [stat.S_IFREG]
    with pytest.raises(OSError, match="Invalid argument"), replacing(tmp_path / "a") as temporary:
        temporary.write_text("second")
    assert (tmp_path / "a").read_text() == "first"


def test_what_a_run_writes_is_removed_before_the_demo_trains_anew_and_nothing_else(tmp_path: Path) -> None:
    for name in ("config.yaml", "metrics.jsonl", "model/config.json", "slurm/job.json", "mine/notes.txt", "todo.txt"):
        write_text(tmp_path / name, "text")
    remove_former_run(RunDir(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "todo.txt"]
    assert (tmp_path / "mine" / "notes.txt").is_file()
