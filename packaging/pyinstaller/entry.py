"""The frozen program starts here: what must happen before the command line of trivet is imported."""

from __future__ import annotations

import os
import sys

# Where Debian, Fedora, openSUSE and Alpine keep them.
_CERTIFICATES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)


def main() -> int:
    """Run the command line; the exit status. `--version` is answered before anything else is imported."""
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # onnxruntime reads it during its first import
    _restore_library_path()
    _find_certificates()
    from trivet import __version__

    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        print(f"trivet {__version__}")
        return 0
    if "--multiprocessing-fork" in arguments or arguments[:1] == ["-c"]:
        import multiprocessing

        multiprocessing.freeze_support()  # a child of multiprocessing ends here
    if arguments[:2] == ["help", "verify-self"]:
        arguments = ["verify-self", "--help"]
    if arguments[:1] == ["verify-self"]:
        from trivet_bundle.verify_self import verify_self

        return verify_self(arguments[1:])
    if arguments and not arguments[0].startswith("-"):
        from pathlib import Path

        from trivet_bundle.cpu_check import missing_cpu_features

        if missing := missing_cpu_features(Path(os.path.realpath(sys.executable)).parent):
            print(
                f"trivet: error: this CPU lacks {', '.join(missing)}; the numpy in this bundle needs x86-64-v2 "
                "(CPUs since about 2009). Use a newer one, or install trivet with pip and a numpy built for this one.",
                file=sys.stderr,
            )
            return 1
    from trivet.app.cli import main as command_line
    from trivet.app.cli.entry import COMMANDS

    COMMANDS["verify-self"] = "compare the files of this archive with its manifest"
    return command_line(arguments)


def _restore_library_path() -> None:
    """Undo the LD_LIBRARY_PATH of the bootloader: this process has read it, its children must not see it."""
    original = os.environ.pop("LD_LIBRARY_PATH_ORIG", None)
    if original is not None:
        os.environ["LD_LIBRARY_PATH"] = original
    else:
        os.environ.pop("LD_LIBRARY_PATH", None)


def _find_certificates() -> None:
    """Point TLS at the certificates of this machine, which the bundle does not bring; a user's own choice stays."""
    if "SSL_CERT_FILE" not in os.environ and "SSL_CERT_DIR" not in os.environ:
        for path in _CERTIFICATES:
            if os.path.isfile(path):
                os.environ["SSL_CERT_FILE"] = path
                return


def guarded_main() -> int:
    """`main`, but a ^C during the imports ends it as quietly as later on."""
    try:
        return main()
    except KeyboardInterrupt:
        return 130  # ExitCode.INTERRUPTED, which may not be imported yet


if __name__ == "__main__":
    sys.exit(guarded_main())
