"""A model folder as a package of Argos Translate: a zip with CTranslate2's files, the sentencepiece model and metadata.

Argos gives CTranslate2 the pieces of a sentence without their end, so the model adds it (`add_source_eos`).
"""

import json
import os
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from dist_transformer.config.data_checks import language_code
from dist_transformer.errors import UserError
from dist_transformer.files import read_json, replacing
from dist_transformer.interop.ctranslate2_export import INFORMATION, export_ctranslate2
from dist_transformer.interop.model_card import CARD, exported_card
from dist_transformer.interop.model_folder import SOURCE_MODEL, LoadedModel, card_of
from dist_transformer.run.outputs import is_stream, writing

NAMES = "ar:Arabic cs:Czech de:German en:English es:Spanish fr:French it:Italian ja:Japanese nl:Dutch pl:Polish pt:Portuguese "
NAMES += "ru:Russian sv:Swedish tr:Turkish uk:Ukrainian zh:Chinese"
"""Names of languages that Argos Translate shows; of others it shows the code."""


def export_argos(loaded: LoadedModel, out: Path, quantization: str | None = None) -> None:
    """Writes a file for `argostranslate.package.install_from_path`; `quantization` as for `export_ctranslate2`. Raises
    UserError: the model has two sentencepiece models, or no languages, or CTranslate2 cannot have it."""
    if loaded.tokenizer_files.target is not None:
        raise UserError("--to argos: a package has one sentencepiece model, this one two: train tokenizer.shared: true")
    about = loaded.information
    source, target = language_code(about.source_language), language_code(about.target_language)
    if not (source.isalnum() and target.isalnum()):
        raise UserError(
            "--to argos: no codes of languages: set source_language and target_language in the model's config.json, as en and de"
        )
    metadata = {"package_version": "1.0", "argos_version": "1.0", "from_code": source, "to_code": target}
    names = dict(each.split(":") for each in NAMES.split())
    metadata |= {"from_name": names.get(source, source), "to_name": names.get(target, target)}
    with writing(out), TemporaryDirectory() as temporary:
        model = Path(temporary) / "model"
        export_ctranslate2(loaded, model, quantization)
        for name in (INFORMATION, CARD):
            (model / name).unlink()
        contents: dict[str, str | bytes] = {
            **{f"model/{path.name}": path.read_bytes() for path in model.iterdir()},
            "model/config.json": json.dumps({**read_json(model / "config.json"), "add_source_eos": True}),
            "metadata.json": json.dumps(metadata),
            "README.md": exported_card("argos", card_of(loaded), asdict(about)),
        }
        contents["sentencepiece.model"] = contents.pop(f"model/{SOURCE_MODEL}")
        opened = out.open("wb") if is_stream(out) else replacing(Path(os.path.realpath(out)))  # a link stays a link
        with opened as file, ZipFile(file, "w") as package:
            for name, content in sorted(contents.items()):  # without times: equal models become equal packages
                package.writestr(ZipInfo(f"translate-{source}_{target}/{name}"), content, ZIP_DEFLATED)
