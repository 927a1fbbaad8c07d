"""The model of PyTorch's translation tutorial, around torch.nn.Transformer, as a model folder."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenised_models import demo_tokenizers
from torch import Tensor, nn

from dist_transformer.data.tokenizer.tokenizer import Tokenizer
from dist_transformer.decoding.search import pad_together
from dist_transformer.errors import CheckpointError, UserError
from dist_transformer.interop.model_folder import TokenizerFiles, load_model_folder
from dist_transformer.interop.torch_transformer import TorchModel, import_torch
from dist_transformer.model.layers import sinusoids

HEADS, D_MODEL = 4, 16


class TokenEmbedding(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, D_MODEL)

    def forward(self, token_BT: Tensor) -> Tensor:
        return self.embedding(token_BT) * D_MODEL**0.5


class PositionalEncoding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pos_embedding", sinusoids(60, D_MODEL)[:, None])

    def forward(self, embedded_BTD: Tensor) -> Tensor:
        return embedded_BTD + self.pos_embedding[: embedded_BTD.shape[1]].transpose(0, 1)


class Seq2SeqTransformer(nn.Module):
    """Its parameters have the names of the tutorial's."""

    def __init__(self, source_vocabulary: int, target_vocabulary: int, **given: Any) -> None:
        super().__init__()
        self.transformer = nn.Transformer(D_MODEL, HEADS, 2, 3, 24, batch_first=True, **given)
        self.generator = nn.Linear(D_MODEL, target_vocabulary)
        self.src_tok_emb = TokenEmbedding(source_vocabulary)
        self.tgt_tok_emb = TokenEmbedding(target_vocabulary)
        self.positional_encoding = PositionalEncoding()

    def forward(self, source_BS: Tensor, target_BT: Tensor, pad_id: int) -> Tensor:
        is_padding = source_BS == pad_id
        hidden = self.transformer(
            self.positional_encoding(self.src_tok_emb(source_BS)),
            self.positional_encoding(self.tgt_tok_emb(target_BT)),
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(target_BT.shape[1]),
            src_key_padding_mask=is_padding,
            memory_key_padding_mask=is_padding,
        )
        return self.generator(hidden)


def make_model(files: TokenizerFiles, fewer_rows: int = 0, **given: Any) -> tuple[Seq2SeqTransformer, Tokenizer]:
    tokenizer = Tokenizer.load(files.source, files.target)
    torch.manual_seed(1)
    sizes = (tokenizer.source_vocabulary - fewer_rows, tokenizer.target_vocabulary - fewer_rows)
    model = Seq2SeqTransformer(*sizes, **given).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model, tokenizer


def assert_equal_logits(folder: Path, model: Seq2SeqTransformer, pad_id: int) -> None:
    loaded = load_model_folder(folder)
    source_BS = pad_together([[5, 9, 11, 7, 2], [6, 2], [17, 30, 2]], pad_id)
    target_BT = pad_together([[1, 8, 13, 21], [1, 5], [1]], pad_id)
    with torch.no_grad():
        expected = model(source_BS, target_BT, pad_id)
        found = loaded.model(source_BS, target_BT)[..., : expected.shape[2]]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("described", "given", "is_shared"),
    [
        ({}, {}, False),
        ({"norm": "pre", "activation": "gelu"}, {"norm_first": True, "activation": "gelu"}, True),
    ],
)
def test_an_imported_model_has_torchs_logits(tmp_path, described, given, is_shared):
    files = demo_tokenizers(tmp_path, is_shared)
    model, tokenizer = make_model(files, **given)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    import_torch(tmp_path / "weights.pt", tmp_path / "ours", TorchModel(HEADS, **described), files, ("en", "de"))
    assert_equal_logits(tmp_path / "ours", model, tokenizer.pad_id)
    torch.save(nn.DataParallel(model).state_dict(), tmp_path / "wrapped.pt")
    import_torch(tmp_path / "wrapped.pt", tmp_path / "wrapped", TorchModel(HEADS, **described), files)
    assert_equal_logits(tmp_path / "wrapped", model, tokenizer.pad_id)
    information = load_model_folder(tmp_path / "ours").information
    assert (information.source_language, information.target_language) == ("en", "de")


def test_names_of_ones_own_safetensors_tied_matrices_and_rows_below_a_multiple_of_8_are_taken(tmp_path):
    files = demo_tokenizers(tmp_path, is_shared=True)
    model, tokenizer = make_model(files, fewer_rows=2)
    model.tgt_tok_emb.embedding.weight = model.generator.weight = model.src_tok_emb.embedding.weight
    state = {
        name.replace("transformer.", "net.core.").replace("generator", "head").replace("tok_emb.embedding", "words"): x
        for name, x in model.state_dict().items()
    }
    save_file({name: tensor.clone() for name, tensor in state.items()}, tmp_path / "weights.safetensors")
    described = TorchModel(HEADS, source_embedding="src_words", target_embedding="tgt_words", output="head")
    import_torch(tmp_path / "weights.safetensors", tmp_path / "ours", described, files)
    assert_equal_logits(tmp_path / "ours", model, tokenizer.pad_id)
    assert load_model_folder(tmp_path / "ours").config.shared_embeddings


@pytest.mark.parametrize(
    ("change", "described", "said"),
    [
        (
            lambda state: state.pop("generator.weight"),
            {},
            r"no tensor generator.weight. Outside .* src_tok_emb.embedding",
        ),
        (lambda state: state.update(extra=torch.ones(3)), {}, r"holds extra \(3,\), which has no place here"),
        (lambda state: state.pop("transformer.encoder.layers.0.self_attn.in_proj_weight"), {}, "0 tensors are called"),
        (lambda state: None, {"num_heads": 3}, "3 heads do not divide d_model 16"),
        (
            lambda state: state.update({"src_tok_emb.embedding.weight": torch.ones(9, D_MODEL)}),
            {},
            "the source embedding has 9 rows, but the source tokenizer about",
        ),
        (
            lambda state: state["positional_encoding.pos_embedding"].add_(1),
            {},
            r"holds positional_encoding.pos_embedding \(60, 16\), which has no place here",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(tmp_path, change, described, said):
    files = demo_tokenizers(tmp_path, is_shared=False)
    state = dict(make_model(files)[0].state_dict())
    change(state)
    torch.save(state, tmp_path / "weights.pt")
    with pytest.raises(UserError, match=said):
        import_torch(tmp_path / "weights.pt", tmp_path / "ours", TorchModel(**{"num_heads": HEADS, **described}), files)
    assert not (tmp_path / "ours").exists()


def test_a_file_of_anything_but_tensors_is_refused(tmp_path):
    files = demo_tokenizers(tmp_path, is_shared=False)
    torch.save({"model": {"a": torch.ones(2)}}, tmp_path / "nested.pt")
    with pytest.raises(CheckpointError, match=r"nested.pt: expected tensors by name"):
        import_torch(tmp_path / "nested.pt", tmp_path / "ours", TorchModel(HEADS), files)
    with pytest.raises(CheckpointError, match=r"gone.pt: no such file, expected weights"):
        import_torch(tmp_path / "gone.pt", tmp_path / "ours", TorchModel(HEADS), files)
    torch.save(nn.Linear(2, 2), tmp_path / "whole.pt")
    with pytest.raises(CheckpointError) as refused:
        import_torch(tmp_path / "whole.pt", tmp_path / "ours", TorchModel(HEADS), files)
    said = "holds a pickled model, not its weights; save model.state_dict()"
    assert str(refused.value) == f"{tmp_path}/whole.pt: {said}"
    with pytest.raises(CheckpointError, match=r"is a folder, expected a file of weights"):
        import_torch(tmp_path, tmp_path / "ours", TorchModel(HEADS), files)
