"""Any model as a job: what it is given, its loss, and the errors before ranks start."""

import json
import sys

import pytest
import torch

from gradwire.bench.models import ModelJob, measure_model
from gradwire.bench.names import GivenModel
from gradwire.core import QSGD
from gradwire.errors import FormatError

MODULE = """
import torch

class Net(torch.nn.Module):
    def __init__(self, width=5, kind="tensor"):
        super().__init__()
        self.kind, self.body = kind, torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, width))

    def forward(self, x):
        out = self.body(x)
        return {"tensor": out, "tuple": (out, 2 * out, 3), "dict": {"a": out}}[self.kind]

class Tokens(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(7, 3)

    def forward(self, input_ids):
        return self.table(input_ids)

def create_model(name, width=5):
    assert name == "net"
    return Net(width)

three = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The folder of a module `own_models`, as the current directory. Also a stand-in for timm, which is not installed."""
    for name in ("own_models", "timm"):
        (tmp_path / f"{name}.py").write_text(MODULE)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("own_models", "timm"):
        sys.modules.pop(name, None)


def job(model, shape, config=""):
    return ModelJob(GivenModel(model=model, config=config, input=shape))


@pytest.mark.parametrize("model", ["own_models:Net", "timm:net"])
def test_keywords_reach_the_model_and_equal_seeds_give_equal_models(module, model):
    made = job(model, "4x3x2x2", "width=9")
    first, again, other = (made.make_model(seed).state_dict() for seed in (3, 3, 4))
    assert first["body.1.weight"].shape == (9, 12)
    assert torch.equal(first["body.1.weight"], again["body.1.weight"])
    assert not torch.equal(first["body.1.weight"], other["body.1.weight"])
    inputs, _ = made.batch(0, 2, 0)
    assert inputs.shape == (4, 3, 2, 2) and made.batch_size == 4
    assert not torch.equal(inputs, made.batch(1, 2, 0)[0])


def test_loss_is_the_mean_of_squares_of_every_float_tensor(module):
    for kind, factor in (("tensor", 1.0), ("tuple", 5.0)):
        made = job("own_models:Net", "4x12", f"kind={kind}")
        model = made.make_model(0)
        batch = made.batch(0, 1, 0)
        expected = factor * model.body(batch[0]).square().mean()
        torch.testing.assert_close(made.loss(model, batch), expected)


def test_tokens_stay_below_the_first_embedding_without_a_config(module):
    made = job("own_models:Tokens", "64x9")
    tokens, _ = made.batch(0, 1, 0)
    assert tokens.shape == (64, 9)
    assert tokens.unique().tolist() == list(range(7))


GPT2 = "n_layer=1,n_embd=16,n_head=2,vocab_size=50,bos_token_id=0,eos_token_id=0"


def test_a_language_model_of_transformers_gives_its_own_loss():
    transformers = pytest.importorskip("transformers")
    made = job("transformers:GPT2LMHeadModel", "2x8", GPT2)
    model = made.make_model(0).eval()
    assert isinstance(model, transformers.GPT2LMHeadModel) and model.config.n_embd == 16
    tokens, _ = made.batch(0, 1, 0)
    assert tokens.shape == (2, 8) and tokens.max() < 50
    expected = torch.nn.functional.cross_entropy(model(tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(made.loss(model, (tokens, tokens)), expected)


def test_a_classifier_of_texts_takes_no_tokens_as_labels():
    pytest.importorskip("transformers")
    made = job("transformers:GPT2ForSequenceClassification", "1x8", GPT2 + ",pad_token_id=0")
    model = made.make_model(0).eval()
    batch = made.batch(0, 1, 0)
    torch.testing.assert_close(made.loss(model, batch), model(batch[0]).logits.square().mean())


def test_the_measured_profile_has_every_parameter(module):
    given = GivenModel(model="own_models:Net", config="width=64", input="32x12")
    profile, costs = measure_model(given, [QSGD(bits=4)], None)
    assert [(tensor.name, tensor.shape) for tensor in sorted(profile.tensors, key=lambda each: each.name)] == [
        ("body.1.bias", (64,)),
        ("body.1.weight", (64, 12)),
    ]
    assert profile.batch == 32 and sum(tensor.backward_us for tensor in profile.tensors) > 0
    assert sum(tensor.forward_us for tensor in profile.tensors) > 0
    assert [codec.spec for codec in costs.codecs] == [QSGD(bits=4)]
    assert measure_model(given, [], costs)[1] is costs


@pytest.mark.parametrize(
    ("text", "keywords"),
    [
        ("", {}),
        ("n=4,rate=0.1,name=gelu,on=true,off=False", {"n": 4, "rate": 0.1, "name": "gelu", "on": True, "off": False}),
        ("sizes=[1, 2],none=null,text='a,b'", {"sizes": [1, 2], "none": None, "text": "a,b"}),
    ],
)
def test_config_is_read_as_keywords(text, keywords):
    assert GivenModel(model="a:b", config=text, input="1").keywords() == keywords


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("net", None, "3"), ("'net'", "MODULE:NAME")),
        (("a:", None, "3"), ("'a:'", "MODULE:NAME")),
        (("a:b", None, None), ("--model a:b", "add --input")),
        ((None, "a=1", None), ("--config a=1 without --model",)),
        ((None, None, "8x3"), ("--input 8x3 without --model",)),
        ((None, "a=1", "8x3"), ("--config a=1 and --input 8x3 without --model",)),
        (("a:b", "4", "3"), ("'4'", "n_layer=4")),
        (("a:b", "a=1,a=2", "3"), ("a=1,a=2", "Give each keyword once")),
        (("a:b", "**x", "3"), ("**x", "Give each keyword once")),
        (("a:b", "a=1)+f(b=2", "3"), ("a=1)+f(b=2", "n_layer=4")),
        (("a:b", None, "8x0"), ("'8x0'", "above 0")),
        (("a:b", None, "8 by 3"), ("'8 by 3'", "8x3x64x64")),
    ],
)
def test_texts_that_cannot_be_meant_are_refused(options, said):
    with pytest.raises(FormatError) as error:
        GivenModel.of(*options)
    assert all(words in str(error.value) for words in said), error.value


@pytest.mark.parametrize(
    ("model", "shape", "config", "said"),
    [
        ("no_such_module:Net", "4x12", "", ("'no_such_module'", "Install it")),
        ("own_models:Nat", "4x12", "", ("'Nat'", "did you mean 'Net'?")),
        ("own_models:three", "4x12", "", ("3", "a class or function")),
        ("own_models:torch.nn.ReLU", "4x12", "", ("ReLU()", "parameters to train")),
        ("own_models:Net", "4x12", "wide=3", ("'wide'", "--config")),
        ("own_models:Net", "4x13", "", ("4x13", "Check the shape")),
        ("own_models:Net", "4x12", "kind=dict", ("dict", "a tuple of tensors")),
        ("own_models:Tokens", "4x3x8x8", "", ("4x3x8x8", "batch x length")),
        ("transformers:GPT2LMHeadModel", "2x8", "n_layers=1", ("n_layers=1", "did you mean 'n_layer'?")),
    ],
)
def test_models_that_cannot_be_trained_are_refused(module, model, shape, config, said):
    if model.startswith("transformers"):
        pytest.importorskip("transformers")
    with pytest.raises(FormatError) as error:
        job(model, shape, config)
    assert all(words in str(error.value) for words in said), error.value


@pytest.fixture
def gradwire(module, interpreters):
    """Runs the program as an installed script runs: without the current directory on the path."""
    code = "import sys; from gradwire.cli import main; sys.path = [p for p in sys.path if p]; main()"
    return lambda *arguments: interpreters.run([sys.executable, "-c", code, *arguments], cwd=module, timeout=120)


def test_bench_refuses_the_model_before_ranks_start(gradwire):
    finished = gradwire("bench", "--model", "own_models:Net", "--input", "4x13", "--links", "unlimited")
    assert finished.returncode == 2 and finished.stdout == ""
    assert "4x13" in finished.stderr and "Traceback" not in finished.stderr


def test_plan_measures_a_model_for_a_cluster(module, gradwire):
    link = {"alpha_us": 30, "gbps": 0.01}
    (module / "cluster.json").write_text(
        json.dumps({"version": 1, "nodes": 4, "ranks_per_node": 1, "intra": link, "inter": link})
    )
    model = ("--model", "own_models:Net", "--config", "width=2000", "--input", "8x12")
    finished = gradwire("plan", *model, "--cluster", "cluster.json", "--spec", "qsgd4", "--json")
    assert finished.returncode == 0, finished.stderr
    buckets = json.loads(finished.stdout)["buckets"]
    assert sorted(name for bucket in buckets for name in bucket["tensors"]) == ["body.1.bias", "body.1.weight"]
    # whether the bias travels with it depends on the times that were measured
    spec = next(bucket["spec"] for bucket in buckets if "body.1.weight" in bucket["tensors"])
    assert spec.get("body.1.weight", spec)["id"] == "qsgd"
    both = gradwire("plan", "profile.json", *model, "--cluster", "cluster.json")
    assert both.returncode == 2 and "Leave out one of them" in both.stderr
    neither = gradwire("plan", "--cluster", "cluster.json")
    assert neither.returncode == 2 and "--model and --input" in neither.stderr
