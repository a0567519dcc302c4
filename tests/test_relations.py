"""Relation decoding: operators that are the model on their own prompts, linear relations, examples and files."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import close, some_tokens

import tensorlens_tl as tlens
from tensorlens_tl import evaluate


@pytest.fixture(scope="module")
def relations_model():
    return tlens.load_demo_model("relations", dtype=torch.float64)


def test_one_operator_on_its_own_prompt_is_the_model(relations_model):
    """m = 1 on the training prompt: the model's own state, exactly; with m = 3 the mean of three single decoders."""
    relation = evaluate.shipped_relations()["country capital"]
    decoder = evaluate.RelationDecoder.fit(relations_model, relation, m=1)
    own = decoder.frozen.output[:, -1]
    assert float((decoder.states(decoder.frozen.tokens) - own).norm() / own.norm()) < 1e-9
    assert torch.equal(decoder.decode(decoder.frozen), evaluate.predictions(decoder.frozen)[0])

    asked = evaluate.few_shot_prompts(relations_model, relation.prompt_templates[0], relation.samples[5:9])
    texts = [f"The capital of {sample.subject} is" for sample in relation.samples[:3]]
    together = evaluate.RelationDecoder.fit(relations_model, texts, m=3).states(asked)
    alone = [evaluate.RelationDecoder.fit(relations_model, [text], m=1).states(asked) for text in texts]
    assert close(together, torch.stack(alone).mean(0))


def test_lre_is_the_first_order_approximation(relations_model):
    """Its Jacobian against torch's own, and at its own prompt with β = 1 the model's own state."""
    relation = evaluate.shipped_relations()["animal young"]
    prompts = evaluate.few_shot_prompts(relations_model, relation.prompt_templates[0], relation.samples[:1])
    assert relations_model.to_string(prompts.tokens[0, prompts.subject_ends[0]]) == relation.samples[0].subject
    for layer in (0, 2):
        lre = evaluate.LinearRelation.fit(relations_model, prompts, layer=layer)
        frozen = tlens.freeze(relations_model, prompts.tokens)
        end = int(prompts.subject_ends[0])

        def through(s, frozen=frozen, end=end, layer=layer):
            kept = []

            def put(live, *, hook):
                live = live.clone()
                live[0, end] = s
                return live

            hooks = [
                (frozen.points.blocks[layer].resid_pre, put),
                ("unembed.hook_in", lambda t, *, hook: kept.append(t)),
            ]
            relations_model.run_with_hooks(**frozen.inputs, fwd_hooks=hooks)
            return kept[0][0, -1]

        W = torch.autograd.functional.jacobian(through, frozen.resid_pre(layer)[0, end])
        assert close(lre.W, W)
        assert close(lre.states(prompts)[0], frozen.output[0, -1])
        doubled = evaluate.LinearRelation.fit(relations_model, prompts, layer=layer, beta=2.0)
        assert close(doubled.states(prompts) - doubled.b, 2 * (lre.states(prompts) - lre.b))


@pytest.mark.whole
def test_relation_decoding(relations_model):
    relations = [evaluate.shipped_relations()[name] for name in ("country capital", "number next")]
    result = evaluate.relation_decoding(relations_model, relations, splits=2, layers=[1], betas=[1.0])
    assert result.units == [relation.name for relation in relations]
    assert close(result.values, result.curves.mean(-1))
    assert result.curves.shape == (2, 3, 2, 2)  # metric, method, relation, split
    assert result.methods == ["tensorlens mean operator", "LRE layer 1, β=1", "random"]
    assert result.mean("faithful", "tensorlens mean operator") > 0.9 > 2 * result.mean("faithful", "random")
    paper = evaluate.relation_decoding(relations_model, relations[:1], protocol="paper")
    assert paper.methods == ["tensorlens mean operator", "LRE layer 0, β=2.5", "random"]
    assert [paper.settings[name] for name in ("m", "shots", "splits", "top_k")] == [3, 2, 6, 20]
    with pytest.raises(tlens.InvalidInputError, match="use one of 'paper'"):
        evaluate.relation_decoding(relations_model, relations, protocol="papers")
    table = evaluate.by_relation(result)
    assert list(table.index) == ["country capital", "number next"]
    assert table.loc["number next", ("random", "mean")] == pytest.approx(float(result.values[0, 2, 1]))
    few = evaluate.Relation("few", ("The capital of {} is",), relations[0].samples[:3])
    with pytest.raises(tlens.InvalidInputError, match=r"nothing to evaluate.*fewer than 3"):
        evaluate.relation_decoding(relations_model, [few])
    with pytest.raises(tlens.InvalidInputError, match="no result of relation_decoding"):
        evaluate.by_relation(replace(result, curves=None, axis=None))
    both = evaluate.relation_decoding(relations_model, [few, relations[0]], splits=1, layers=[], top_k=None)
    assert list(both.skipped) == ["few"]


def test_splits_that_nobody_knows_are_left_out_alone(relations_model):
    """A split without a known subject takes neither the others nor the relation with it."""
    relation = evaluate.shipped_relations()["country capital"]
    false = [
        evaluate.Sample(sample.subject, relation.samples[k - 3].object) for k, sample in enumerate(relation.samples)
    ]
    mixed = evaluate.Relation("half wrong", relation.prompt_templates, (*false[:5], *relation.samples[5:8]))
    result = evaluate.relation_decoding(relations_model, [mixed], splits=8, layers=[])
    known = result.curves[0, 0, 0].isfinite()
    assert bool(known.any())
    assert not result.skipped
    assert result.values[0, 0, 0] == result.curves[0, 0, 0][known].mean()


def test_examples_of_unequal_length(relations_model):
    relation = evaluate.shipped_relations()["country capital"]  # South Korea and two others are two tokens
    with pytest.raises(tlens.InvalidInputError, match=r"'South Korea' \(7\).*most common length, 6 tokens"):
        evaluate.few_shot_prompts(relations_model, relation.prompt_templates[0], relation.samples)
    kept = evaluate.few_shot_prompts(
        relations_model, relation.prompt_templates[0], relation.samples, length="most common"
    )
    assert len(kept.samples) == len(relation.samples) - 3
    assert evaluate.few_shot_prompts(
        relations_model, "The capital of {} is", relation.samples, length=7
    ).tokens.shape == (3, 7)
    with pytest.raises(tlens.InvalidInputError, match="no prompt has it"):
        evaluate.few_shot_prompts(relations_model, "The capital of {} is", relation.samples, length=9)
    texts = ["The capital of France is", "The capital of South Korea is", "The capital of Italy is"]
    fit = evaluate.RelationDecoder.fit
    with pytest.raises(tlens.InvalidInputError, match=r"South Korea is' \(7\)"):
        fit(relations_model, texts, m=2)
    decoder = fit(relations_model, texts, m=2, length="most common")
    with pytest.raises(tlens.InvalidInputError, match="made from prompts of 6 tokens, these have 7"):
        decoder.decode(texts[1])
    pairs = [("France", "Paris"), ("Italy", "Rome")]
    assert fit(relations_model, pairs, m=2, template="The capital of {} is").frozen.tokens.shape == (2, 13)
    for examples, options, message in [
        (pairs, {}, "template="), (pairs, {"template": "The capital is"}, "one {}"), ([], {}, "no examples"),
        (pairs, {"template": "The capital of {} is", "m": 3}, "2 examples, m=3"), (texts[:1], {"m": 2}, "1 examples"),
    ]:  # fmt: skip
        with pytest.raises(tlens.InvalidInputError, match=message):
            fit(relations_model, examples, **{"m": 2, **options})


def test_relations_in_the_published_format(tmp_path):
    facts = {
        "name": "x",
        "prompt_templates": ["{} is"],
        "samples": [{"subject": "a", "object": "b"}],
        "properties": {"k": 1},
    }
    (tmp_path / "x.json").write_text(json.dumps(facts))
    assert evaluate.Relation.load(tmp_path / "x.json").samples == (evaluate.Sample("a", "b"),)
    broken = [
        ("{", "not a relation"),
        (json.dumps({**facts, "samples": []}), "no samples"),
        (json.dumps({**facts, "prompt_templates": ["no place"]}), "needs one {}"),
        (json.dumps({k: v for k, v in facts.items() if k != "name"}), "KeyError"),
    ]
    for text, message in broken:
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(tlens.FileFormatError, match=message):
            evaluate.Relation.load(tmp_path / "x.json")
    with pytest.raises(tlens.FileFormatError, match="FileNotFoundError"):
        evaluate.Relation.load(tmp_path / "none.json")
    assert len(evaluate.shipped_relations()) >= 5


def test_models_without_a_plain_unembedding_decode_no_relations(model_named):
    decoder = evaluate.RelationDecoder.fit(model_named("bridge/bert"), some_tokens(2, 6), m=2)
    with pytest.raises(tlens.UnsupportedModelError, match="no plain unembedding"):
        decoder.decode(some_tokens(2, 6))
