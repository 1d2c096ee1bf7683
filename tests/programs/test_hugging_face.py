"""Hugging Face's `Trainer` logs with a wrapped model what it logs with the plain one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import tiny_gpt2
from torch import Tensor, nn

from raydp_parallel import DataParallel
from raydp_parallel.hugging_face import attach

transformers = pytest.importorskip("transformers")


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random words; rows have labels of their own number, and a column that no model takes."""

    def __init__(self, kind: str) -> None:
        self.ids = torch.randint(48, (24, 12), generator=torch.Generator().manual_seed(1))
        self.kind = kind

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        words = self.ids[at]
        said = torch.where(torch.arange(12) < 4 + 2 * (at % 4), words, -100)
        labels = said if self.kind == "gpt2" else words[0] % 2
        return {"input_ids": words, "labels": labels, "unused": words}


def fresh(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "gpt2":
        return tiny_gpt2()
    config = transformers.BertConfig(
        vocab_size=48,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    made: nn.Module = transformers.BertForSequenceClassification(config)
    return made


def fit(
    model: nn.Module, kind: str, folder: Path, resume: bool = False, **settings: Any
) -> list[float]:
    """Train for four steps, and evaluate; returns what is logged of losses and gradients."""
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=4,
        per_device_train_batch_size=3,
        logging_steps=1,
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **settings,
    )
    trainer = transformers.Trainer(model, arguments, None, Texts(kind), Texts(kind))
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
    trainer.evaluate()
    names = ("loss", "grad_norm", "eval_loss")
    return [float(entry[n]) for entry in trainer.state.log_history for n in names if n in entry]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("bert", {}),
        ("bert", {"bf16": True, "label_names": ["labels"]}),
        ("gpt2", {"label_names": ["labels"]}),
        ("gpt2", {"gradient_accumulation_steps": 2, "bf16": True}),
    ],
)
def test_the_trainer_s_losses(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Also of a training that resumes; an evaluation has a loss if it knows the labels."""
    expected = fit(fresh(kind), kind, tmp_path / "plain", **settings)
    net = fresh(kind)
    model = DataParallel(net, ["cpu", "cpu"])
    reruns = model.executor.stats().reruns
    found = fit(model, kind, tmp_path / "ours", **settings)
    assert model.executor.stats().reruns == reruns  # its default optimizer is a fused one
    close = 1e-2 if "bf16" in settings else 1e-4
    count = len(expected) if "label_names" in settings else 8
    assert found == pytest.approx(expected[:count], rel=close)
    again = fresh(kind)
    fit(DataParallel(again, ["cpu", "cpu"]), kind, tmp_path / "ours", True, **settings)
    for one, other in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("attached", [True, False])
def test_what_the_trainer_saves_is_loaded_by_from_pretrained(
    attached: bool, tmp_path: Path
) -> None:
    """The best checkpoint, too; also if the trainer is given the wrapper."""
    net = fresh("bert")
    model = DataParallel(net, ["cpu", "cpu"])
    settings: dict[str, Any] = {"max_steps": 4, "save_steps": 2, "report_to": [], "use_cpu": True}
    if attached:
        settings |= {"load_best_model_at_end": True, "eval_steps": 2, "eval_strategy": "steps"}
    arguments = transformers.TrainingArguments(str(tmp_path), **settings)
    rows = Texts("bert")
    trainer = transformers.Trainer(net if attached else model, arguments, None, rows, rows)
    if attached:
        assert attach(trainer, model) is trainer
    trainer.train()
    assert model.stats().forwards >= 4
    assert ("eval_loss" in trainer.evaluate()) == attached
    trainer.save_model()
    best = trainer.state.best_model_checkpoint or tmp_path / "checkpoint-4"
    for folder in (tmp_path, best):
        loaded = type(net).from_pretrained(folder)
        for name, value in net.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], value), name
    assert next(iter(model.state_dict())).startswith("module.")


def test_attach_refuses_another_module(tmp_path: Path) -> None:
    arguments = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    trainer = transformers.Trainer(fresh("bert"), arguments)
    with pytest.raises(ValueError, match="different modules"):
        attach(trainer, DataParallel(fresh("bert"), ["cpu", "cpu"]))


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "BertModel"])
def test_a_model_that_has_shown_its_layers(kind: str) -> None:
    """Transformers leaves hooks on them, which find the values to fill in a module of its own."""
    made = getattr(transformers, kind)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32}
    heads = {"num_attention_heads": 2, "attn_implementation": "eager", "use_cache": False}
    net = made(made.config_class(vocab_size=48, **sizes, **heads)).eval()
    ids, shown = torch.randint(48, (4, 6)), {"output_hidden_states": True}
    net(ids, output_attentions=True, **shown)
    model = DataParallel(net, ["cpu", "cpu"])
    for settings in (shown, {}, {"output_attentions": True}):
        ours, plain = model(ids, **settings), net(ids, **settings)
        assert ours.keys() == plain.keys()
        torch.testing.assert_close(ours.to_tuple(), plain.to_tuple())
