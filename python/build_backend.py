"""What pip calls (PEP 517, PEP 660): compiles libgemma4 and packs it with the module. Needs Python and a C compiler, and downloads nothing.

The C files are those of the repository, one folder up; a source distribution carries them in csrc/. They are compiled for any processor of the
machine's kind, not for this one alone: the fast backend looks at the processor when it runs. The environment: CC, CFLAGS and LDFLAGS as everywhere
(CFLAGS=-fno-openmp: without threads); what is in them comes last. An editable install compiles nothing: the module then loads the library that `make` builds.

Reading order: sources, compile_library, build_wheel, build_sdist.
"""
import base64
import hashlib
import io
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARY = {"win32": "libgemma4.dll", "darwin": "libgemma4.dylib"}.get(sys.platform, "libgemma4.so")


def sources():
    """The C files of the library, and the headers that they include."""
    if (HERE / "csrc").is_dir():
        files = sorted((HERE / "csrc").glob("*.c"))
    else:
        makefile = HERE.parent / "Makefile"
        core = re.search(r"^CORE *= *(.*)$", makefile.read_text(), re.M) if makefile.is_file() else None
        if not core:
            raise FileNotFoundError(f"{HERE}: neither csrc/ nor the repository around it is here; build with pip 21.3 or newer, which leaves a folder where it is")
        files = [HERE.parent / f"{name}.c" for name in core.group(1).split()]
    found = list(files)
    for file in found:  # which grows meanwhile
        for name in re.findall(r'^#include "(.*)"', file.read_text(encoding="utf-8"), re.M):
            if file.parent / name not in found:
                found.append(file.parent / name)
    return found


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def compile_library(target):
    cc = shlex.split(os.environ.get("CC", "")) or [next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), "cc")]
    flags = ["-std=gnu11", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-shared"]
    flags += ["-D__USE_MINGW_ANSI_STDIO=1", "-static"] if os.name == "nt" else ["-fPIC"]
    with tempfile.TemporaryDirectory() as scratch:
        empty = Path(scratch, "empty.c")
        empty.write_text("int empty;\n")
        try:
            status, said = run([*cc, *flags, str(empty), "-o", str(target)])
        except OSError as e:
            status, said = 1, str(e)
        if status:
            raise RuntimeError(f"a C compiler (gcc or clang) is needed, and `{shlex.join(cc)}` cannot build a library; CC names another one:\n{said}")
        if run([*cc, *flags, "-fopenmp", str(empty), "-o", str(target)])[0] == 0:
            flags.append("-fopenmp")
    names = [str(f) for f in sources() if f.suffix == ".c"]
    command = [*cc, *flags, *shlex.split(os.environ.get("CFLAGS", "")), *names, "-lm", *shlex.split(os.environ.get("LDFLAGS", "")), "-o", str(target)]
    print(shlex.join(command), flush=True)
    status, said = run(command)
    if status:
        raise RuntimeError(f"compiling libgemma4 failed:\n{said}")


def project():
    """The table of pyproject.toml, with the version."""
    table = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    header = next(f for f in sources() if f.name == "gemma4.h")
    return {**table, "version": re.search(r'^#define G4_VERSION "(.*)"', header.read_text(encoding="utf-8"), re.M).group(1)}


def metadata():
    p = project()
    lines = ["Metadata-Version: 2.1", f"Name: {p['name']}", f"Version: {p['version']}", f"Summary: {p['description']}", f"License: {p['license']}",
             f"Requires-Python: {p['requires-python']}", *(f"Requires-Dist: {d}" for d in p["dependencies"]), "Description-Content-Type: text/markdown"]
    return "\n".join(lines) + "\n\n" + (HERE / p["readme"]).read_text(encoding="utf-8")


def license_text():
    return next(f for f in (HERE / "LICENSE", HERE.parent / "LICENSE") if f.is_file()).read_bytes()


def modules():
    return {f"gemma4/{f.name}": f.read_bytes() for f in sorted((HERE / "gemma4").iterdir()) if f.suffix == ".py" or f.name == "py.typed"}


def write_wheel(directory, tag, files):
    """files: {path in the wheel: bytes}. Gives the wheel's name. The same files give the same bytes."""
    p = project()
    info = f"{p['name']}-{p['version']}.dist-info"
    files = {**files, f"{info}/METADATA": metadata().encode(), f"{info}/LICENSE": license_text(),
             f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: gemma4\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()}
    record = "".join(f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n" for path, data in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    name = f"{p['name']}-{p['version']}-{tag}.whl"
    with zipfile.ZipFile(Path(directory, name), "w", zipfile.ZIP_DEFLATED) as z:
        for path, data in files.items():
            entry = zipfile.ZipInfo(path, (2020, 1, 1, 0, 0, 0))
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            z.writestr(entry, data)
    return name


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    with tempfile.TemporaryDirectory() as scratch:
        compile_library(Path(scratch, LIBRARY))
        library = Path(scratch, LIBRARY).read_bytes()
    system = sysconfig.get_platform().replace("universal2", platform.machine())  # the library is for one processor
    return write_wheel(wheel_directory, "py3-none-" + re.sub(r"[^A-Za-z0-9]", "_", system), {**modules(), f"gemma4/{LIBRARY}": library})


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    return write_wheel(wheel_directory, "py3-none-any", {"gemma4.pth": f"{HERE}\n".encode()})


def build_sdist(sdist_directory, config_settings=None):
    p = project()
    top = f"{p['name']}-{p['version']}"
    files = {**modules(), "LICENSE": license_text(), "PKG-INFO": metadata().encode()}
    files |= {name: (HERE / name).read_bytes() for name in ("pyproject.toml", "build_backend.py", p["readme"])}
    files |= {f"csrc/{f.name}": f.read_bytes() for f in sources()}
    with tarfile.open(Path(sdist_directory, f"{top}.tar.gz"), "w:gz", format=tarfile.PAX_FORMAT) as tar:
        for path, data in files.items():
            entry = tarfile.TarInfo(f"{top}/{path}")
            entry.size, entry.mode = len(data), 0o644
            tar.addfile(entry, io.BytesIO(data))
    return f"{top}.tar.gz"
