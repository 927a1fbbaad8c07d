"""A package that `export --to argos` writes, opened by Argos Translate itself: its translations beside ours.

    python benchmarks/argos.py runs/student --source test.en --work /tmp/argos

Argos Translate is installed from PyPI into an environment under --work; this environment stays as it is. Two things are not
taken: Stanza, which the package imports but uses only for packages with its models (an empty module stands for it: it
brings a torch with CUDA); and the model of MiniSBD, which Argos would download to split sentences: each line is one
sentence. Argos searches with a beam of 1, where searches agree, and with its own beam of 4 and length penalty.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from common import begin, markdown_table

from dist_transformer.config.schema import DecodingConfig
from dist_transformer.data.tokenizer.tokenizer import Tokenizer
from dist_transformer.decoding.ctranslate2_search import CTranslate2Searcher
from dist_transformer.decoding.translate import translate_lines
from dist_transformer.interop.ctranslate2_export import export_argos, export_ctranslate2
from dist_transformer.interop.model_folder import load_model_folder

VERSION = "1.11.0"
NEEDED = ("ctranslate2", "sentencepiece", "sacremoses", "packaging", "minisbd")
TRANSLATE = """
import sys
from argostranslate import package, translate
package.install_from_path(sys.argv[1])
[installed] = package.get_installed_packages()
print(f"{installed}, {installed.package_path.name}", file=sys.stderr)
translation = translate.get_translation_from_codes(sys.argv[2], sys.argv[3])
translation.underlying.sentencizer.split_sentences = lambda text: [text]
for line in sys.stdin:
    print(translation.translate(line.rstrip("\\n")), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a run folder, or a model folder")
    parser.add_argument("--source", type=Path, required=True, help="sentences, one a line")
    parser.add_argument("--work", type=Path, required=True, help="folder of the environment")
    parser.add_argument("--sentences", type=int, default=200)
    parser.add_argument("--quantization", default="int8")
    arguments = parser.parse_args()
    begin(threads=1)
    python = environment(arguments.work)
    inner = arguments.model / "model"
    loaded = load_model_folder(inner if inner.is_dir() else arguments.model)
    lines = arguments.source.read_text(encoding="utf-8").splitlines()[: arguments.sentences]
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        package, exported = Path(temporary) / "package.argosmodel", Path(temporary) / "exported"
        export_argos(loaded, package, arguments.quantization)
        export_ctranslate2(loaded, exported, arguments.quantization)
        tokenizer = Tokenizer.load(loaded.tokenizer_files.source)
        for beam in (1, 4):
            config = DecodingConfig(beam_size=beam)
            searcher = CTranslate2Searcher(exported, tokenizer.special, config, torch.device("cpu"))
            ours = [best.text for best, *_ in translate_lines(searcher, tokenizer, lines, config)]
            codes = (loaded.information.source_language, loaded.information.target_language)
            theirs = by_argos(python, arguments.work, package, codes, lines, beam)
            same = sum(a.replace("_", " ") == b for a, b in zip(ours, theirs, strict=True))
            rows.append([str(beam), str(len(lines)), f"{same / len(lines):.1%}"])
        print(f"\n{lines[0]}\n{theirs[0]}\n\npackage: {package.stat().st_size / 1e6:.2f} MB\n")
    print(markdown_table(["beam", "sentences", "same translation"], rows))


def environment(work: Path) -> Path:
    """The python of an environment with Argos Translate, which is made where it is not there."""
    folder = work.absolute() / "environment"
    python = folder / "bin" / "python"
    if not (work / "stanza.py").is_file():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, "--no-deps", f"argostranslate=={VERSION}"], check=True)
        subprocess.run([*install, *NEEDED], check=True)
        (work / "stanza.py").write_text('"""Stands for Stanza, which is imported and not used."""\n', encoding="utf-8")
    return python


def by_argos(python: Path, work: Path, package: Path, codes: tuple[str, str], lines: list[str], beam: int) -> list[str]:
    """Translations by Argos Translate, with nothing else installed and its folders below a new one."""
    with tempfile.TemporaryDirectory() as home:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": home,
            "PYTHONPATH": str(work.absolute()),
            "ARGOS_BEAM_SIZE": str(beam),
            "ARGOS_INTRA_THREADS": "1",
        }
        command = [str(python), "-c", TRANSLATE, str(package), *codes]
        text = "".join(f"{line}\n" for line in lines)
        done = subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    return done.stdout.splitlines()


if __name__ == "__main__":
    main()
