"""The download page of a release: what index.json says, for people. Plain HTML, no script, nothing from elsewhere.

What a new user types stands in <pre> with the names of STEPS; trial.sh takes the lines from the page and runs them.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from .names import PROJECT, PUBLIC_KEY, VERIFIER, parse_archive_name

STEPS: Mapping[str, str] = {
    "check": 'sha256sum -c "$ARCHIVE.sha256"',
    "check-signature": f'python3 {VERIFIER} "$ARCHIVE" --key {PUBLIC_KEY}',
    "unpack": 'tar xzf "$ARCHIVE"\ncd "${ARCHIVE%.tar.gz}"\nbin/trivet --version\nbin/trivet verify-self',
    "chat": 'bin/trivet chat --model "$MODEL" --temperature 0',
    "serve": 'bin/trivet serve "$MODEL"',
    "ask": 'bin/trivet complete --url http://127.0.0.1:8000 "Water boils at" --temperature 0',
}


def page(body: Mapping[str, Any]) -> str:
    """The page for the content of index.json."""
    title = f"{PROJECT} {html.escape(body['version'])}"
    rows = "\n".join(_row(entry) for entry in body["artifacts"])
    tools = "\n".join(
        f'<li><a href="{tool["name"]}">{tool["name"]}</a>, SHA-256 <code>{tool["sha256"]}</code></li>'
        for tool in body["checking_files"]
    )
    digests = "\n".join(f"{tool['sha256']}  {tool['name']}" for tool in body["checking_files"])
    example = body["artifacts"][0]["archive"]
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<h1>{title}</h1>
<table>
<tr><th>archive<th>channel<th>size<th>SHA-256<th>needs<th>CPU tiers that were run<th>limits</tr>
{rows}
</table>
<h2>1. Download into one folder</h2>
<ul>
<li>one archive of the table, with the checksum and the provenance beside it</li>
{tools}
</ul>
<p>All commands below are for this folder and a shell that knows the archive and a model of yours, a GGUF file:</p>
<pre id="names">ARCHIVE={example}
MODEL=/path/to/model.gguf</pre>
<h2>2. Check, offline</h2>
<p>The file that checks, the key, and whether the archive is whole. The SHA-256 must be that of the table:</p>
<pre id="check">echo "{digests}" | sha256sum -c
{STEPS["check"]}</pre>
<p>Who signed it, that the signature is about these bytes, and each file inside against what was signed. This takes
Python 3.8 and OpenSSL 3 or newer, on whatever machine you have them; the machine that runs trivet needs neither:</p>
<pre id="check-signature">{STEPS["check-signature"]}</pre>
<p>The key signs every release. This page and the key come from one place, so keep the key of your first download and
check later releases with it: a page that was changed can name another key, and not the one that you have.</p>
<h2>3. Unpack anywhere</h2>
<pre id="unpack">{STEPS["unpack"]}</pre>
<h2>4. Run</h2>
<p>Nothing else is needed: no Python, no compiler, no network. A conversation, in which the likeliest answer is taken
(without <code>--temperature 0</code> it is another one each time):</p>
<pre id="chat">{STEPS["chat"]}</pre>
<p>An OpenAI-compatible server, until ^C; and a question to it from another shell:</p>
<pre id="serve">{STEPS["serve"]}</pre>
<pre id="ask">{STEPS["ask"]}</pre>
<p>{html.escape(body["retention"])}</p>
</html>
"""


def _row(entry: Mapping[str, Any]) -> str:
    tiers = [name for name, values in {**entry["cpu_tiers"], **entry["sms"]}.items() if values["runtime_verified"]]
    floor = entry["abi_floor"]
    archive = html.escape(entry["archive"])
    checksum, provenance = parse_archive_name(entry["archive"]).companions
    beside = f'<a href="{checksum}">checksum</a>, <a href="{provenance}">provenance</a>'
    cells = [
        f'<a href="{archive}">{archive}</a><br>{beside}',
        entry["channel"],
        f"{entry['size'] / 1e6:.1f} MB",
        f"<code>{entry['sha256']}</code>",
        html.escape(", ".join([f"{floor['libc']}", f"a {floor['cpu']} CPU", *entry["driver"]])),
        html.escape(", ".join(tiers) or "none"),
        html.escape(" ".join(entry["limits"])),
    ]
    return "<tr>" + "".join(f"<td>{cell}" for cell in cells) + "</tr>"
