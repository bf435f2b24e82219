"""Who owns each file and module of a frozen bundle, under which licence, with which text. The source of both SBOMs.

Input is what PyInstaller collected (sources.json of packaging/pyinstaller/trivet.spec). A file that nobody owns, a
licence that is unknown or not allowed, and a licence without a text are errors.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "sbom" / "bundle.toml"
COMMON_LICENCES = "/usr/share/common-licenses/"
_TEXT_NAME = re.compile(r"(?i)(^|/)(licen[cs]e|copying|notice)[^/]*$")


class BundleError(Exception):
    """Something in the bundle that nobody answers for."""


@dataclass(slots=True)
class Component:
    name: str
    version: str
    kind: str  # "python", "interpreter", "debian", "compiled", "bootloader", "vendored", "linked" or "own"
    purl: str
    license: str  # SPDX expression
    texts: list[tuple[str, str]] = field(default_factory=list)  # (name, licence text)
    files: list[str] = field(default_factory=list)  # paths in the bundle
    modules: list[str] = field(default_factory=list)  # Python modules inside the program or base_library.zip
    parts: list[dict[str, str]] = field(
        default_factory=list
    )  # compiled in, as the part's own SBOM says: name, version, purl


class Owners:
    """Finds the component of a file on the build machine. One instance per bundle."""

    def __init__(
        self,
        site_packages: Path,
        base_prefix: Path,
        python_version: str,
        epoch_distro: str,
        *,
        system: Path = Path("/"),
        compiled: Mapping[str, str] | None = None,
        linked: Path | None = None,
    ) -> None:
        self.table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
        self.site_packages = site_packages
        self.base_prefix = base_prefix
        self.python_version = python_version
        self.distro = epoch_distro  # for purls, like "debian-12"
        self.system = system  # the root of the system that the interpreter and its libraries are of
        self._dpkg_query = ["dpkg-query", f"--admindir={self._path('/var/lib/dpkg')}"]
        # Debian source packages that the root compiled below base_prefix -> version.
        self.compiled = dict(compiled or {})
        self.linked = linked  # folder of the packages whose code is inside libraries of ours
        self.components: dict[str, Component] = {}
        self._records: dict[str, importlib.metadata.Distribution] = {}
        for distribution in importlib.metadata.distributions(path=[str(site_packages)]):
            for file in distribution.files or []:
                self._records[os.path.realpath(site_packages / file)] = distribution

    def owner(self, destination: str, source: str) -> Component:
        """The component of `source`, which the bundle holds as `destination`; BundleError if nobody owns it."""
        for entry in self.table["vendored"]:
            if destination.startswith(entry["match"]):
                return self._vendored(entry, source)
        for entry in self.table["linked"]:
            if destination.startswith(entry["match"]):
                return self._linked(entry)
        real = self._real(source)
        if (distribution := self._records.get(real)) is not None:
            is_freezer = _normalised(distribution.name) == "pyinstaller"
            return self.bootloader() if is_freezer else self._distribution(distribution)
        if real.startswith(str(ROOT / "packaging")):
            return self.own()
        if destination == "base_library.zip" or self._is_interpreter(real):
            return self.interpreter()
        for entry in self.table["compiled"]:
            if entry["package"] in self.compiled and os.path.basename(real).startswith(tuple(entry["files"])):
                return self._compiled(entry)
        if real.startswith(("/usr/lib/", "/lib/")):
            return self._debian(real)
        raise BundleError(f"nobody owns {destination} (from {source})")

    def own(self) -> Component:
        return self._distribution(self._named("trivet"))

    def bootloader(self) -> Component:
        found = self._named("pyinstaller")
        name = "pyinstaller-bootloader"
        if name not in self.components:
            licence = "GPL-2.0-or-later WITH Bootloader-exception"
            purl = f"pkg:pypi/pyinstaller@{found.version}"
            made = Component(name, found.version, "bootloader", purl, licence, self._dist_info_texts(found))
            self.components[name] = self._judged(made)
        return self.components[name]

    def interpreter(self) -> Component:
        if "cpython" not in self.components:
            package = f"python{self.python_version.rpartition('.')[0]}"
            texts = [
                (path.name, path.read_text(encoding="utf-8", errors="replace"))
                for path in (
                    self._path(self.base_prefix / "share/doc" / package / "copyright"),
                    self._path(f"/usr/share/doc/lib{package}-minimal/copyright"),
                    self._path(self.base_prefix / "share/doc/cpython/LICENSE"),
                )
                if path.is_file()
            ][:1]
            version = self.compiled.get(package, self.python_version)
            source = package in self.compiled
            purl = f"pkg:deb/debian/{package}@{version}?arch=source" if source else f"pkg:generic/cpython@{version}"
            self.components["cpython"] = self._judged(
                Component("cpython", version, "interpreter", purl, "PSF-2.0", texts)
            )
        return self.components["cpython"]

    def _path(self, path: Path | str) -> Path:
        """Where a file of the system lies on this machine."""
        return self.system / str(path).lstrip("/")

    def _real(self, source: str) -> str:
        """`source` without links, as the system names it; files outside of it keep their name."""
        real, root = os.path.realpath(self._path(source)), os.path.realpath(self.system).rstrip("/")
        inside = real.startswith(f"{root}/") and os.path.exists(real)
        return real.removeprefix(root) if inside else os.path.realpath(source)

    def _is_interpreter(self, real: str) -> bool:
        name = "python" + self.python_version.rpartition(".")[0]
        return os.path.basename(real).startswith(f"lib{name}") or f"/lib/{name}/" in real

    def _named(self, name: str, folder: Path | None = None) -> importlib.metadata.Distribution:
        folder = folder or self.site_packages
        for distribution in importlib.metadata.distributions(path=[str(folder)]):
            if _normalised(distribution.name) == name:
                return distribution
        raise BundleError(f"{name} is not installed in {folder}")

    def _distribution(self, found: importlib.metadata.Distribution) -> Component:
        name = _normalised(found.name)
        if name not in self.components:
            metadata = found.metadata
            licence = metadata["License-Expression"] or self.table["python"].get(name.replace("-", "_"))
            if licence is None:
                raise BundleError(f"the licence of {name} is not known: name it in {TABLE.name}")
            texts = self._dist_info_texts(found)
            for path in self.table["texts"].get(name.replace("-", "_"), []):
                file = ROOT / path.removeprefix("repo:") if path.startswith("repo:") else self.site_packages / path
                texts.append((path, file.read_text(encoding="utf-8", errors="replace")))
            kind = "own" if name == "trivet" else "python"
            made = Component(name, found.version, kind, f"pkg:pypi/{name}@{found.version}", licence, texts)
            made.parts = _embedded_parts(found) if kind == "python" else []
            self.components[name] = self._judged(made)
        return self.components[name]

    def _dist_info_texts(self, found: importlib.metadata.Distribution) -> list[tuple[str, str]]:
        names = sorted(
            str(file) for file in found.files or [] if ".dist-info/" in str(file) and _TEXT_NAME.search(str(file))
        )
        return [
            (name.partition("/")[2], Path(str(found.locate_file(name))).read_text(encoding="utf-8", errors="replace"))
            for name in names
        ]

    def _vendored(self, entry: Mapping[str, str], source: str) -> Component:
        name = entry["name"]
        if name not in self.components:
            host = self._records.get(os.path.realpath(source))
            if host is None:
                raise BundleError(f"{source} is in no wheel")
            purl = f"pkg:generic/{name}?vendored_by={_normalised(host.name)}@{host.version}"
            texts = self._dist_info_texts(host)
            made = Component(name, f"in {host.name} {host.version}", "vendored", purl, entry["license"], texts)
            self.components[name] = self._judged(made)
        return self.components[name]

    def _linked(self, entry: Mapping[str, str]) -> Component:
        name = entry["name"]
        if name not in self.components:
            own, inside = self._named("trivet"), self._named(entry["package"], self.linked)
            texts = [("LICENSE", (ROOT / "LICENSE").read_text(encoding="utf-8"))]
            texts += [(f"{inside.name}: {path}", text) for path, text in self._dist_info_texts(inside)]
            purl = f"pkg:pypi/trivet@{own.version}#{name}"
            made = Component(name, own.version, "linked", purl, entry["license"], texts)
            licence = str(inside.metadata["License-Expression"])
            part = {"name": inside.name, "version": inside.version, "license": licence}
            made.parts = [part | {"purl": f"pkg:pypi/{inside.name}@{inside.version}"}]
            self.components[name] = self._judged(made)
        return self.components[name]

    def _compiled(self, entry: Mapping[str, Any]) -> Component:
        package = str(entry["package"])
        if package not in self.components:
            version = self.compiled[package]
            text = (self.base_prefix / "share/doc" / package / "copyright").read_text(encoding="utf-8")
            purl = f"pkg:deb/debian/{package}@{version}?arch=source"
            made = Component(package, version, "compiled", purl, entry["license"], [("copyright", text)])
            self.components[package] = self._judged(made)
        return self.components[package]

    def _debian(self, real: str) -> Component:
        package = ""
        for path in (real, real.removeprefix("/usr")):  # dpkg knows a file by the path it was packed with
            found = subprocess.run([*self._dpkg_query, "-S", path], capture_output=True, text=True, check=False)
            package = package or found.stdout.partition(":")[0]
        if not package:
            raise BundleError(f"no Debian package owns {real}")
        if package not in self.components:
            licence = self.table["debian"].get(package.replace(".", "_"))
            if licence is None:
                raise BundleError(f"the licence of the Debian package {package} is not known: name it in {TABLE.name}")
            query = [*self._dpkg_query, "-W", "-f", "${Version}\n", package]
            version = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
            text = self._path(f"/usr/share/doc/{package}/copyright").read_text(encoding="utf-8", errors="replace")
            purl = f"pkg:deb/debian/{package}@{version}?distro={self.distro}"
            self.components[package] = self._judged(
                Component(package, version, "debian", purl, licence, [("copyright", text)])
            )
        return self.components[package]

    def _judged(self, component: Component) -> Component:
        if refused := refused_licences(component.license, self.table["allowed"]["licenses"]):
            raise BundleError(f"{component.name} is under {', '.join(refused)}, which no bundle may hold")
        if not component.texts:
            raise BundleError(f"there is no licence text for {component.name}: name one in {TABLE.name}")
        return component


def refused_licences(expression: str, allowed: Iterable[str]) -> list[str]:
    """Licences of the expression that are not allowed; of alternatives (OR) one is enough."""
    allowed = set(allowed)
    out = []
    for part in re.split(r"\s+AND\s+", expression.replace("(", "").replace(")", "")):
        choices = re.split(r"\s+OR\s+", part)
        if not any(choice.strip() in allowed for choice in choices):
            out.append(part.strip())
    return out


def collect(sources: Mapping[str, Any], owners: Owners) -> list[Component]:
    """Components of all files and modules in `sources`, sorted; each file and module has exactly one."""
    for destination, source, kind in sources["files"]:
        if kind == "SYMLINK":
            continue  # the manifest lists it; its target has the owner
        owners.owner(destination, source).files.append(f"lib/{destination}")
    for name, source in sources["modules"]:
        if source not in ("", "-"):  # a namespace package has no file
            owners.owner(name, source).modules.append(name)
    owners.bootloader().files.append("trivet")
    for component in owners.components.values():
        component.files.sort()
        component.modules.sort()
    return sorted(owners.components.values(), key=lambda component: component.name)


def notices(components: Iterable[Component]) -> str:
    """The text of THIRD-PARTY-NOTICES: every part, its licence, every text that belongs to it."""
    out = ["Third-party parts of this bundle, their licences and the texts of these.\n"]
    common: set[str] = set()
    for component in components:
        if component.kind == "own":
            continue
        out.append(f"{'=' * 100}\n{component.name} {component.version}\nLicence: {component.license}\n")
        if component.parts:
            named = ", ".join(f"{part['name']} {part['version']} ({part['license']})" for part in component.parts)
            out.append(f"Compiled in: {named}\n")
        for name, text in component.texts:
            out.append(f"{'-' * 100}\n{component.name}: {name}\n\n{text.strip()}\n")
            common.update(match.rstrip(".") for match in re.findall(rf"{COMMON_LICENCES}([\w.+-]+)", text))
    for name in sorted(common):
        path = Path(COMMON_LICENCES, name)
        if path.is_file():
            out.append(
                f"{'=' * 100}\n{name}, which texts above refer to\n\n{path.read_text(encoding='utf-8').strip()}\n"
            )
    return "\n".join(out)


def _embedded_parts(found: importlib.metadata.Distribution) -> list[dict[str, str]]:
    """Components that the wheel's own SBOM (dist-info/sboms) names."""
    parts = {}
    for file in found.files or []:
        if "/sboms/" in str(file) and str(file).endswith(".json"):
            data = json.loads(Path(str(found.locate_file(file))).read_text(encoding="utf-8"))
            for entry in data.get("components", []):
                licence = _licence_of(entry)
                purl = str(entry.get("purl", "")).partition("?")[0]
                key = f"{entry['name']} {entry.get('version', '')}"
                parts[key] = {
                    "name": entry["name"],
                    "version": str(entry.get("version", "")),
                    "purl": purl,
                    "license": licence,
                }
    return [parts[key] for key in sorted(parts)]


def _licence_of(entry: Mapping[str, Any]) -> str:
    named = [
        item.get("expression") or item.get("license", {}).get("id") or item.get("license", {}).get("name")
        for item in entry.get("licenses", [])
    ]
    return " AND ".join(name for name in named if name) or "NOASSERTION"


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
