"""Runs the server of an unpacked bundle and talks to it, inside a network namespace that has nothing but loopback.

`verify` starts it as a program of its own (`python -m release.smoke`), under `unshare`. It prints one JSON object.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import signal
import socket
import struct
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

_SLOWNESS = 4.0 if "QEMU_CPU" in os.environ else 1.0  # of an emulated CPU
START_SECONDS, ANSWER_SECONDS, STOP_SECONDS = 300.0 * _SLOWNESS, 300.0 * _SLOWNESS, 60.0 * _SLOWNESS
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_INHERITED = ("TRIVET_CPU_TIER", "QEMU_CPU", "QEMU_LD_PREFIX")  # which tier and which emulated CPU a run is about
_SYSTEM_CALLS = (
    "open,openat,creat,mkdir,mkdirat,rename,renameat,renameat2,unlink,unlinkat,symlink,symlinkat,link,linkat,"
    "connect,bind,sendto"
)


def raise_loopback() -> None:
    """Bring up `lo`; a new network namespace has it down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack_from("H", fcntl.ioctl(handle, _SIOCGIFFLAGS, request), 16)[0]
        fcntl.ioctl(handle, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


def interfaces() -> list[str]:
    return sorted(name for _, name in socket.if_nameindex())


def serve_and_ask(
    program: Path, model: Path, scratch: Path, cases: list[dict[str, Any]], trace: Path | None
) -> dict[str, Any]:
    """Start `trivet serve` on an ephemeral port, ask it everything, end it with SIGTERM; what it answered."""
    environment = clean_environment(scratch) | {name: os.environ[name] for name in _INHERITED if name in os.environ}
    command = [str(program), "serve", str(model), "--port", "0", "--max-model-len", "256"]
    if trace is not None:
        command = [
            "strace",
            "-f",
            "-y",
            "--seccomp-bpf",
            "-s",
            "200",
            "-e",
            f"trace={_SYSTEM_CALLS}",
            "-o",
            str(trace),
            *command,
        ]
    log = scratch / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, cwd=scratch, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            base = _address(server, log)
            out: dict[str, Any] = {
                "health": _get(f"{base}/health")[0],
                "version": json.loads(_get(f"{base}/version")[1]).get("version"),
                "interfaces": interfaces(),
            }
            name = json.loads(_get(f"{base}/v1/models")[1])["data"][0]["id"]
            out["answers"] = [_complete(base, name, case) for case in cases]
        finally:
            status = _stop(server)
    return out | {"exit_status": status}


def _stop(server: subprocess.Popen[bytes]) -> int:
    """SIGTERM, as a service manager would; the exit status, -9 if it had to be killed."""
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGTERM)
    try:
        return server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        return -signal.SIGKILL


def clean_environment(scratch: Path) -> dict[str, str]:
    """An environment that knows nothing of the machine: empty HOME, own cache and temporary folder below `scratch`."""
    folders = {"HOME": "home", "TRIVET_HOME": "cache", "TMPDIR": "tmp"}
    for folder in folders.values():
        (scratch / folder).mkdir(exist_ok=True)
    return {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"} | {
        name: str(scratch / folder) for name, folder in folders.items()
    }


def _address(server: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        text = log.read_text(encoding="utf-8", errors="replace")
        if match := re.search(r"http://127\.0\.0\.1:\d+", text):
            base = match[0]
            try:
                if _get(f"{base}/health")[0] == 200:
                    return base
            except OSError:
                pass
        if server.poll() is not None:
            raise SystemExit(f"the server ended with status {server.returncode}: {text[-2000:]}")
        time.sleep(0.1)
    raise SystemExit(
        f"the server did not start within {START_SECONDS:.0f} s: {log.read_text(errors='replace')[-2000:]}"
    )


def _get(url: str) -> tuple[int, bytes]:
    with urllib.request.urlopen(url, timeout=ANSWER_SECONDS) as answer:
        return answer.status, answer.read()


def _complete(base: str, model: str, case: dict[str, Any]) -> str:
    body = {"model": model, "prompt": case["prompt"], "max_tokens": case["max_tokens"], "temperature": 0}
    request = urllib.request.Request(
        f"{base}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def trace_problems(trace: str, allowed: tuple[str, ...]) -> list[str]:
    """System calls of a trace that reach beyond loopback, or change files outside of the `allowed` folders."""
    out = []
    for line in trace.splitlines():
        # A call that another thread interrupts is written in two lines; the first one has what it asked for.
        call = re.match(r"\d+\s+(\w+)\((.*)(?:\)\s+= -?\d+| <unfinished \.\.\.>)", line)
        if call is None:
            continue
        name, arguments = call[1], call[2]
        if name in ("connect", "bind", "sendto"):
            out += _network_problems(name, arguments)
        elif not (name in ("open", "openat") and not re.search(r"O_(CREAT|WRONLY|RDWR|TRUNC)", arguments)):
            out += _file_change_problems(name, arguments, allowed)
    return sorted(set(out))


def _network_problems(name: str, arguments: str) -> list[str]:
    family = re.search(r"sa_family=(AF_\w+)", arguments)
    if family is None or family[1] in ("AF_UNSPEC", "AF_NETLINK"):
        return []
    if family[1] == "AF_UNIX":
        path = re.search(r'sun_path="([^"]*)"', arguments)
        # The C library asks the name service cache of the machine, if there is one, who the user is.
        return (
            [] if path and path[1] == "/var/run/nscd/socket" else [f"{name} to the socket {path[1] if path else '?'}"]
        )
    if re.search(r'inet_addr\("127\.|"::1"|inet_addr\("0\.0\.0\.0"\).*htons\(0\)', arguments):
        return []
    return [f"{name}: {arguments[:160]}"]


def _file_change_problems(name: str, arguments: str, allowed: tuple[str, ...]) -> list[str]:
    devices = ("/dev/null", "/dev/tty", "/dev/urandom")
    base = re.match(r"(?:AT_FDCWD|\d+)<([^>]*)>", arguments)
    paths = re.findall(r'"((?:[^"\\]|\\.)*)"', arguments)
    full = [path if path.startswith("/") else f"{base[1] if base else ''}/{path}" for path in paths]
    return [f"{name} {path}" for path in full if path not in devices and not path.startswith(allowed)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("cases", type=Path)
    parser.add_argument("--trace", type=Path)
    args = parser.parse_args()
    raise_loopback()
    cases = json.loads(args.cases.read_text(encoding="utf-8"))["cases"]
    print(json.dumps(serve_and_ask(args.program, args.model, args.scratch, cases, args.trace)))


if __name__ == "__main__":
    main()
