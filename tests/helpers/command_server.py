"""`dist-transformer` for a page that starts it many times: one process imports the program once and forks for each start.

    with quick_command(folder) as path: subprocess.run(["bash", "-c", "dist-transformer --help"], env={..., "PATH": path})

What is on the PATH hands its arguments, folder, environment, standard input and outputs to the server, and ends with the
exit code that comes back. Only the imports are shared: each start is a process of its own. If it has other constants than the
server (`running.with_constants`), it shares the imports of libraries only. Where the first argument is a Python file, that
is run in place of the command.
"""

import contextlib
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

CONSTANTS = "OTHER_CONSTANTS"
CLIENT = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    asked = json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [len(asked).to_bytes(4, "big")], [0, 1, 2])
    server.sendall(asked)
    sys.exit(int.from_bytes(server.recv(1) or b"1", "big"))
"""


@contextlib.contextmanager
def quick_command(folder: Path, environment: dict[str, str], started_by: Sequence[str] = ()) -> Iterator[str]:
    """Writes `dist-transformer` into `folder` and serves it for as long as the block lasts; gives the PATH to use.

    `started_by`: a command that starts the server, such as one that takes away privileges.
    """
    address = f"\0{uuid.uuid4()}"  # no file: a path would be limited to a hundred characters
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        client = folder / "dist-transformer"
        client.write_text(CLIENT.format(python=sys.executable, address=address), encoding="utf-8")
        client.chmod(0o755)
        server = subprocess.Popen(
            [*started_by, sys.executable, __file__, str(listener.fileno())],
            env=environment, pass_fds=[listener.fileno()], start_new_session=True,
        )  # fmt: skip
    try:
        yield f"{folder}{os.pathsep}{environment['PATH']}"
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # what it has forked, too
        server.wait()


def serve(listener: socket.socket) -> None:
    """A process for each connection, for ever."""
    given = dict(os.environ)
    # To have them imported: what commands import in their turn, too. DeepSpeed comes with the ranks, before mlflow.
    import matplotlib.figure  # noqa: F401

    from dist_transformer.cli import main
    from dist_transformer.decoding import loaded_model  # noqa: F401
    from dist_transformer.tracking import mlflow_client  # noqa: F401
    from dist_transformer.training import rank  # noqa: F401

    dict(main.Commands())  # imports every verb
    # Modules set variables when they are imported; a command that finds them imported has these, too.
    defaults = {name: value for name, value in os.environ.items() if given.get(name) != value}
    gc.freeze()  # else each command would look through all of it at its end
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait for a command
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _answer(connection, main.main, defaults)
        connection.close()


def _answer(connection, main, defaults) -> None:
    """Runs one command in a process of its own, tells its exit code, and ends this process."""
    length, files, _, _ = socket.recv_fds(connection, 4, 3)
    with connection.makefile("rb") as reader:
        arguments, folder, environment = json.loads(reader.read(int.from_bytes(length, "big")))
    command = os.fork()
    if command == 0:
        connection.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        # Those of the server remember what kind of file they were opened on.
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", errors="backslashreplace")  # noqa: SIM115
        os.chdir(folder)
        constants = os.environ.get(CONSTANTS)
        os.environ.clear()
        os.environ.update({**defaults, **environment})
        if os.environ.get(CONSTANTS) != constants:
            main = _imported_anew()
        if len(arguments) > 1 and arguments[1].endswith(".py"):
            sys.argv = arguments[1:]
            sys.path.insert(0, os.path.dirname(arguments[1]))  # as for any program: modules beside it
            runpy.run_path(arguments[1], run_name="__main__")
        else:
            sys.argv = arguments
            main()
        sys.exit()
    for file in files:
        os.close(file)
    _, status = os.waitpid(command, 0)
    code = os.waitstatus_to_exitcode(status)
    connection.sendall(bytes([code if code >= 0 else 128 - code]))
    os._exit(0)


def _imported_anew():
    """The program, but no library, with the constants that the environment names."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("dist_transformer", "sitecustomize")]:
        del sys.modules[name]
    sys.path.insert(0, str(Path(__file__).with_name("other_constants")))
    import sitecustomize  # noqa: F401

    from dist_transformer.cli import main

    return main.main


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
