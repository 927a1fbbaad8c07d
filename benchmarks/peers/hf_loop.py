"""MarianMTModel of Hugging Face transformers in a plain loop: its Trainer has no batches by tokens."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

from loop import BOS_ID, EOS_ID, PAD_ID, read_task, train
from torch import Tensor
from torch.nn import functional as F
from transformers import MarianConfig, MarianMTModel


def main() -> None:
    task = read_task()
    sizes = task["sizes"]
    config = MarianConfig(
        vocab_size=task["vocabulary"],
        max_position_embeddings=512,
        d_model=sizes["d_model"],
        encoder_layers=sizes["num_encoder_layers"],
        decoder_layers=sizes["num_decoder_layers"],
        encoder_attention_heads=sizes["num_heads"],
        decoder_attention_heads=sizes["num_heads"],
        encoder_ffn_dim=sizes["d_ff"],
        decoder_ffn_dim=sizes["d_ff"],
        activation_function="relu",
        dropout=sizes["dropout"],
        attention_dropout=0.0,
        activation_dropout=0.0,
        scale_embedding=True,
        share_encoder_decoder_embeddings=True,
        tie_word_embeddings=True,
        use_cache=False,
        init_std=sizes["d_model"] ** -0.5,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        decoder_start_token_id=BOS_ID,
        forced_eos_token_id=None,
    )
    model = MarianMTModel(config)

    def loss_sum(source: Tensor, target_in: Tensor, target_out: Tensor) -> Tensor:
        mask = source != PAD_ID
        logits = model(input_ids=source, attention_mask=mask.long(), decoder_input_ids=target_in).logits
        options = {"ignore_index": PAD_ID, "label_smoothing": task["label_smoothing"], "reduction": "sum"}
        return F.cross_entropy(logits.flatten(0, 1), target_out.flatten(), **options)

    train(task, model, loss_sum)


if __name__ == "__main__":
    main()
