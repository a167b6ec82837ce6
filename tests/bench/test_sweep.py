"""``bench sweep`` and the report in HTML."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest

from aiakq.arguments.bench import PRESETS, SweepArguments
from aiakq.bench import serve, sweep
from aiakq.bench.html import page
from aiakq.bench.request_metrics import measure
from aiakq.bench.serve import ServeOptions, limits_of
from aiakq.cli import main
from aiakq.errors import AiakqError
from aiakq.records import Record


def options_of(url: str, **settings) -> ServeOptions:
    return ServeOptions(base_url=url, **{"input_len": 16, "output_len": 4, "duration_s": 0.3, **settings})


class Pretended:
    """Takes the place of ``serve.run``: a server that keeps the limits up to ``capacity`` requests per second."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.rates: list[float] = []
        self.seeds: list[int | None] = []

    def __call__(self, options: ServeOptions, progress: object) -> Record:
        rate = options.request_rate
        self.seeds.append(options.seed)
        if rate == float("inf"):
            rate = 2.0 if options.max_concurrency == 1 else 40.0
        else:
            self.rates.append(rate)
        metrics = measure([], 1.0, {}) | {"stopped": None}
        metrics |= {"completed": 10, "request_throughput": rate, "output_throughput": 10 * rate}
        metrics["goodput_share"] = 1.0 if rate <= self.capacity else 0.5
        return Record("serve", 1, {}, metrics, {})


def test_a_search_ends_close_below_what_the_server_takes(monkeypatch):
    server = Pretended(capacity=23.0)
    monkeypatch.setattr(serve, "run", server)
    arguments = SweepArguments(search="goodput", precision=5.0)
    record = sweep.run(options_of("x", goodput={"ttft": 100.0}), arguments, lambda *known: None)
    assert 23.0 / 1.05 <= record.metrics["max_goodput_rate"] <= 23.0
    assert server.rates[:5] == [2.0, 4.0, 8.0, 16.0, 32.0] and len(server.rates) < 14


def test_a_search_on_a_server_that_keeps_no_limit_ends(monkeypatch):
    monkeypatch.setattr(serve, "run", Pretended(capacity=0.0))
    arguments = SweepArguments(search="goodput")
    record = sweep.run(options_of("x", preset="chat"), arguments, lambda *known: None)
    assert record.metrics["max_goodput_rate"] is None and len(record.metrics["levels"]) < 12


def test_rates_of_a_sweep_lie_between_one_at_a_time_and_saturation(monkeypatch):
    server = Pretended(capacity=25.0)
    monkeypatch.setattr(serve, "run", server)
    progress: list = []
    options = options_of("x", goodput={"ttft": 100.0}, seed=5)
    record = sweep.run(options, SweepArguments(levels=3), lambda *known: progress.append(known))
    assert server.rates == pytest.approx([11.5, 21.0, 30.5])
    assert record.metrics["max_goodput_rate"] == pytest.approx(21.0)
    assert server.seeds == [5, 6, 7, 8, 9]  # no level repeats the prompts of another
    assert progress[0] == (0, 5, "one at a time") and progress[-1][0] == 4


@pytest.mark.parametrize(
    ("settings", "arguments", "text"),
    [
        ({"num_prompts": 5}, {}, "--num-prompts"),
        ({"request_rate": 5.0}, {}, "--request-rate"),
        ({}, {"search": "goodput"}, "A search needs limits"),
    ],
)
def test_what_makes_no_sense_is_refused(settings, arguments, text):
    with pytest.raises(AiakqError, match=text):
        sweep.run(options_of("x", **settings), SweepArguments(**arguments), lambda *known: None)


def test_presets_are_limits():
    assert limits_of(options_of("x", preset="mlperf-llama3.1-8b")) == {"ttft": 2000, "tpot": 100}
    assert set().union(*PRESETS.values()) <= {"ttft", "tpot", "e2el"}
    with pytest.raises(AiakqError, match="both set limits"):
        serve.check(options_of("x", preset="chat", goodput={"ttft": 1.0}))


# --- the command, with a server ------------------------------------------------------------------------------------


class Links(HTMLParser):
    """Counts tags, and notes everything a browser would load."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loaded: list[str | None] = []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.loaded += [value for name, value in attributes if name in ("src", "href")]


def test_the_command_sweeps_a_server_and_writes_a_report(bench_server, tmp_path, capsys):
    report = tmp_path / "report.html"
    words = ["bench", "sweep", "--base-url", bench_server.url, "--duration", "0.4", "--input-len", "16"]
    words += ["--output-len", "4", "--levels", "1", "--preset", "chat", "--html", str(report)]
    assert main([*words, "--max-concurrency", "8", "--fail-if", "max_output_throughput<0.1"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert [level["level"] for level in document["levels"]][:2] == ["one at a time", "saturated"]
    assert document["levels"][1]["max_concurrent_requests"] == 8 and document["limits"] == {"ttft": 200, "tpot": 50}
    assert "highest rate" in err and "one at a time" in err
    text = report.read_text()
    links = Links()
    links.feed(text)
    assert links.tags.count("svg") == 2 + 2 + 2 * 3 and links.loaded == []
    assert "://" not in text.replace(bench_server.url, "") and "script" not in links.tags
    assert "default-src 'none'" in text  # a browser loads nothing, whatever the names in it hold


def test_a_report_of_one_run_escapes_what_it_shows(bench_server):
    record = serve.run(
        options_of(bench_server.url, duration_s=None, num_prompts=3, save_detailed=True), lambda *k: None
    )
    document = record.document()
    document["warnings"] = ["<b>bold & bad</b>"]
    document["config"]["model"] = '"><img src=x>'
    text = page(document)
    assert "&lt;b&gt;bold &amp; bad" in text and "<img" not in text and text.count("<svg") == 4


def test_a_report_of_a_run_where_nothing_was_completed():
    document = serve.template() | {"date": "d", "seed": 1}
    text = page(document)
    assert text.count("<svg") == 0 and "–" in text


def test_a_report_in_no_folder_is_refused_before_anything_is_sent(tmp_path, capsys):
    words = ["bench", "serve", "--base-url", "http://127.0.0.1:9", "--html", str(tmp_path / "none" / "a.html")]
    assert main(words) != 0
    assert "error[output_failed]" in capsys.readouterr().err
