"""The explorer's questions as jobs: seen, cancelled, dropped; frozen again where the model changed; flat memory."""

import gc
import http.client
import json
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import tensorlens_tl as tlens
from tensorlens_tl.algebra.progress import CancelledError, note_progress
from tensorlens_tl.explorer import Explorer, Session
from tensorlens_tl.explorer.questions import Passes
from tensorlens_tl.hooks import hooks_on

pytest.importorskip("tensorlens_tl.explorer.server", exc_type=ImportError)

from test_explorer import PROMPT, alive, chromium, load, one, send, settled, several, wait

from tensorlens_tl.explorer.server import Jobs

SLOW = {"text": PROMPT, "method": "leave-one-out"}


@pytest.fixture(scope="module")
def model():
    return tlens.load_demo_model()


@pytest.fixture
def session(model):
    return Session(model, name="demo")


@pytest.fixture
def opened(session):
    explorer = Explorer(session, 0).start()
    yield explorer
    explorer.close()


def until(condition, seconds=30):
    """What a condition gives as soon as it is something."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.01)
    raise AssertionError("it did not come")


def jobs_of(explorer):
    return json.loads(send(explorer, "/api/jobs")[1])["jobs"]


# ------------------------------------------------------------------ jobs by themselves


def test_jobs_run_one_at_a_time_in_their_order():
    jobs = Jobs()
    seen = []
    running = threading.Lock()

    def work(number):
        assert running.acquire(blocking=False)
        time.sleep(0.01)
        seen.append(number)
        running.release()
        return number

    submitted = [jobs.submit("view", lambda number=number: work(number)) for number in range(5)]
    assert [job.future.result(10) for job in submitted] == seen == list(range(5))
    assert not jobs.describe()
    jobs.close()


def test_a_running_job_stops_at_its_next_note_and_the_next_one_runs():
    jobs = Jobs()
    started = threading.Event()

    def work():
        started.set()
        while True:
            note_progress("turns", 0.25)
            time.sleep(0.001)

    job = jobs.submit("turning", work)
    waiting = jobs.submit("waiting", lambda: 1)
    started.wait(10)
    first, second = until(lambda: [d for d in [jobs.describe()] if d[0]["share"] == 0.25])[0]
    assert (first["view"], first["what"]) == ("turning", "turns")
    assert first["seconds"] > 0
    assert second["seconds"] is None
    assert jobs.cancel(job.number)
    with pytest.raises(CancelledError):
        job.future.result(10)
    assert waiting.future.result(10) == 1
    assert not jobs.cancel(job.number)
    jobs.close()


def test_no_failure_handler_swallows_a_cancelled_job():
    jobs = Jobs()
    started = threading.Event()

    def work():
        while True:
            started.set()
            try:
                note_progress()
            except Exception:
                pytest.fail("it went on")

    job = jobs.submit("stubborn", work)
    started.wait(10)
    jobs.close()
    with pytest.raises(CancelledError):
        job.future.result(10)
    assert jobs.submit("late", lambda: 1).future.cancelled()


# ------------------------------------------------------------------ over HTTP


def gated(explorer, monkeypatch, view="tokens"):
    """Have a view wait, noting progress, until the event that is returned is set."""
    real = explorer._session._views[view]
    entered, go = threading.Event(), threading.Event()

    def slow(inquiry):
        entered.set()
        while not go.is_set():
            note_progress("waiting", 0.5)
            time.sleep(0.005)
        return real(inquiry)

    monkeypatch.setitem(explorer._session._views, view, slow)
    return entered, go


def test_a_running_question_is_seen_and_cancelled(opened, monkeypatch, model):
    hooks = hooks_on(model)
    expected = json.loads(send(opened, "/api/tokens", SLOW)[1])
    entered, _ = gated(opened, monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(send, opened, "/api/tokens", SLOW)
        entered.wait(10)
        (job,) = until(lambda: [job for job in jobs_of(opened) if job["share"]])
        assert (job["view"], job["what"], job["share"]) == ("tokens", "waiting", 0.5)
        assert json.loads(send(opened, "/api/cancel", {"id": job["id"]})[1]) == {"cancelled": True}
        assert answer.result(30)[0] == 499
    monkeypatch.undo()
    assert hooks_on(model) == hooks
    again = json.loads(send(opened, "/api/tokens", SLOW)[1])
    assert again["scores"] == expected["scores"]
    assert not jobs_of(opened)


@pytest.mark.parametrize("fields", [{"method": "leave-one-out"}, {"method": "norm"}, {"new": 20}, {}])
def test_the_librarys_own_work_stops_midway_and_gives_the_same_afterwards(model, fields):
    view = "generated" if "new" in fields else "tokens"
    fields = {"text": PROMPT, **fields}
    expected = Session(model).view(view, fields)["scores"]
    session, hooks = Session(model), hooks_on(model)
    jobs = Jobs()
    job = jobs.submit(view, lambda: session.view(view, fields))
    notes = []
    real = job.watch

    def stop_midway(what, share):  # in the worker, at the thirtieth note
        notes.append(what)
        if len(notes) == 30:
            job.cancel()
        real(what, share)

    job.watch = stop_midway
    cancelled = []
    for _ in range(2):
        try:
            job.future.result(60)
        except CancelledError:
            cancelled.append(len(notes))
            break
        job = jobs.submit(view, lambda: Session(model).view(view, fields))
        job.watch = stop_midway
    jobs.close()
    assert hooks_on(model) == hooks
    assert session.view(view, fields)["scores"] == expected


def test_a_page_that_goes_away_stops_its_question(opened, monkeypatch):
    entered, _ = gated(opened, monkeypatch)
    connection = http.client.HTTPConnection("127.0.0.1", opened._server.port)
    connection.request("POST", "/api/tokens", json.dumps(SLOW), {"X-Token": opened._server.token})
    entered.wait(10)
    connection.close()
    until(lambda: not jobs_of(opened))
    assert alive(opened)


@pytest.mark.parametrize("fields", [{}, {"id": "1"}, {"id": True}, {"id": 1.5}, {"id": None}, [1]])
def test_a_cancel_of_nothing_is_refused(opened, fields):
    assert send(opened, "/api/cancel", json.dumps(fields).encode())[0] == 400
    assert json.loads(send(opened, "/api/cancel", {"id": 10**30})[1]) == {"cancelled": False}
    assert alive(opened)


@pytest.mark.parametrize("path", ["/api/jobs", "/api/cancel", "/api/upload"])
@pytest.mark.parametrize("headers", [{"X-Token": "wrong"}, {"Host": "evil.example"}, {"Origin": "http://evil.example"}])
def test_other_pages_see_and_stop_nothing(opened, path, headers):
    assert send(opened, path, {"id": 1}, **headers)[0] == 403
    assert send(opened, path, {"id": 1}, "GET")[0] in (404, 405)


def test_closing_stops_what_runs(session, monkeypatch):
    explorer = Explorer(session, 0).start()
    entered, _ = gated(explorer, monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(send, explorer, "/api/tokens", SLOW)
        entered.wait(10)
        start = time.monotonic()
        explorer.close()
        assert time.monotonic() - start < 5
        assert answer.result(10)[0] == 499
    assert not explorer._server._thread.is_alive()
    with pytest.raises(ConnectionRefusedError):
        send(explorer)
    explorer.close()  # once more does nothing


@pytest.mark.whole
def test_ctrl_c_ends_the_command_in_the_middle_of_a_question(tmp_path):
    script = tmp_path / "slow.py"
    script.write_text(
        "import time\n"
        "import tensorlens_tl as tlens\n"
        "from tensorlens_tl.algebra.progress import note_progress\n"
        "from tensorlens_tl.explorer import Explorer, Session\n"
        "session = Session(tlens.load_demo_model())\n"
        "def forever(question):\n"
        "    print('entered', flush=True)\n"
        "    while True:\n"
        "        note_progress()\n"
        "        time.sleep(0.01)\n"
        "session._views['tokens'] = forever\n"
        "page = Explorer(session, 0)\n"
        "print(page.url, flush=True)\n"
        "page.run()\n"
    )
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        url = process.stdout.readline().strip()
        port, token = url.split(":")[2].split("/")[0], url.split("token=")[1]
        connection = http.client.HTTPConnection("127.0.0.1", int(port))
        connection.request("POST", "/api/tokens", json.dumps(SLOW), {"X-Token": token})
        assert process.stdout.readline().strip() == "entered"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert "Traceback" not in errors
    assert process.returncode in (0, 130)


def test_a_notebook_reads_selection_and_result(model):
    page = tlens.explore(model)
    try:
        assert page.selection == {}
        assert page.result is None
        body = json.loads(send(page, "/api/tokens", {"text": PROMPT, "query": 10})[1])
        assert page.selection["text"] == PROMPT
        assert page.selection["query"] == 10
        assert page.result.scores[0, 0].tolist() == pytest.approx(body["scores"])
        assert page.url in page._repr_html_()
    finally:
        page.close()


# ------------------------------------------------------------------ a model that changes


@pytest.fixture
def own_model():
    return tlens.load_demo_model()


def test_a_changed_model_is_frozen_again(own_model):
    session = Session(own_model)
    views = ("prompt", "tokens", "components")
    before = {view: session.view(view, {"text": PROMPT}) for view in views}
    assert {answer["version"] for answer in before.values()} == {0}
    with torch.no_grad():
        own_model.blocks[1].attn.W_O.mul_(0.5)
    after = {view: session.view(view, {"text": PROMPT}) for view in views}
    assert {answer["version"] for answer in after.values()} == {1}
    fresh = Session(own_model)
    for view in views:
        expected = fresh.view(view, {"text": PROMPT})
        assert after[view] | {"version": 0} == expected
        assert before[view] | {"version": 0} != expected


def test_a_model_that_changes_after_its_prediction_is_noticed(own_model):
    session = Session(own_model)
    session.view("prompt", {"text": PROMPT})
    with torch.no_grad():
        own_model.blocks[1].attn.W_O.mul_(0.5)
    assert session.view("tokens", {"text": PROMPT})["version"] == 1


def test_a_hook_that_is_put_on_between_two_clicks_counts(own_model):
    session = Session(own_model)
    before = session.view("tokens", {"text": PROMPT})
    own_model.add_hook("blocks.1.hook_resid_pre", lambda stream, hook: stream + torch.linspace(-1, 1, 128))
    after = session.view("tokens", {"text": PROMPT})
    assert after["version"] == 1
    assert after["total"] != before["total"]
    own_model.reset_hooks()
    again = session.view("tokens", {"text": PROMPT})
    assert again["version"] == 2
    assert again["scores"] == before["scores"]


def test_generated_text_by_itself_is_written_again(own_model):
    session = Session(own_model)
    fields = {"text": PROMPT, "new": 4}
    before = session.view("generated", fields)
    handle = own_model.blocks[1].mlp.register_forward_hook(lambda module, args, output: 2 * output)
    handle.remove()  # as it was: nothing to freeze again
    assert session.view("generated", fields) == before
    with torch.no_grad():
        own_model.blocks[1].attn.W_O.mul_(0.5)
    after = session.view("generated", fields)
    assert after["version"] == 1
    assert after | {"version": 0} == Session(own_model).view("generated", fields)


def test_a_model_that_changes_while_it_is_asked_is_asked_once_more(own_model, monkeypatch):
    session = Session(own_model)
    real = session._views["tokens"]
    calls = []

    def changing(inquiry):
        session.frozen(inquiry.question)
        if not calls:
            with torch.no_grad():
                own_model.blocks[0].attn.W_O.mul_(0.5)
        calls.append(1)
        return real(inquiry)

    monkeypatch.setitem(session._views, "tokens", changing)
    view = session.view("tokens", {"text": PROMPT})
    assert (len(calls), view["version"]) == (2, 1)
    assert view["scores"] == Session(own_model).view("tokens", {"text": PROMPT})["scores"]


def test_of_two_models_either_may_change():
    checkpoints = tlens.demo.induction_checkpoints()
    first, last = checkpoints[min(checkpoints)], checkpoints[max(checkpoints)]
    session = Session(last, first)
    fields = {"text": "a b c a b", "other": "a b c a b"}
    before = session.view("tokens", fields)
    with torch.no_grad():
        first.blocks[0].attn.W_O.mul_(0.5)
    after = session.view("tokens", fields)
    assert after["version"] == 1
    assert after["total"] != before["total"]


# ------------------------------------------------------------------ memory


def test_what_is_dropped_is_gone_at_once(model):
    session = Session(model, passes=2)
    seen = []
    real = Passes.frozen

    def frozen(self, question, **options):
        run = real(self, question, **options)
        seen.append(weakref.ref(run))
        return run

    gc.collect()
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Passes, "frozen", frozen)
            for number in range(6):
                fields = {"text": f"The value of {number}", "other": f"The name of {number}"}
                for view in ("prompt", "tokens", "components"):
                    session.view(view, {"text": fields["text"]})
                session.view("tokens", fields)
        alive = {id(run()) for run in seen if run() is not None}
        assert len(alive) <= 4 + 2  # two passes, and the two runs of each difference that is held
    finally:
        gc.enable()


def test_large_passes_are_held_by_size(model, monkeypatch):
    size = sum(tensor.nbytes for tensor in tlens.freeze(model, "The value of 0").capture.activations.values())
    monkeypatch.setattr("tensorlens_tl.explorer.questions.MOST_BYTES", int(2.5 * size))
    session = Session(model)
    for number in range(4):
        session.view("tokens", {"text": f"The value of {number}"})
    assert len(session._passes._frozen[0]) == 2


# ------------------------------------------------------------------ the page


def test_the_page_shows_progress_cancels_and_says_that_the_model_changed(own_model, monkeypatch):
    explorer = Explorer(Session(own_model, name="demo"), 0).start()
    try:
        with chromium() as browser:
            load(browser, explorer, text=PROMPT)
            shown = [chip.get_attribute("title") for chip in several(browser, ".tokens .chip")]
            _, go = gated(explorer, monkeypatch)
            several(browser, ".tokens .chip")[20].click()
            wait(browser, lambda: "waiting" in one(browser, "#progress").text)
            assert one(browser, "#progress progress").get_attribute("value") == "0.5"
            one(browser, "#cancel").click()
            wait(browser, lambda: one(browser, "#status").text == "Cancelled")
            until(lambda: not explorer._server.jobs.describe())
            wait(browser, lambda: not one(browser, "#progress").is_displayed())
            assert not several(browser, ".tokens .chip")  # nothing of the question before stays
            one(browser, ".again").click()
            wait(browser, lambda: "waiting" in one(browser, "#progress").text)
            one(browser, "#undo").click()  # what is asked now overtakes what runs
            until(lambda: not [job for job in explorer._server.jobs.describe() if job["share"] == 0.5])
            go.set()
            settled(browser)
            assert [chip.get_attribute("title") for chip in several(browser, ".tokens .chip")] == shown
            assert not one(browser, "#notice").is_displayed()
            with torch.no_grad():
                own_model.blocks[1].attn.W_O.mul_(0.5)
            browser.refresh()
            settled(browser)
            several(browser, ".tokens .chip")[20].click()
            wait(browser, lambda: "query=20" in browser.current_url)
            settled(browser)
            with torch.no_grad():
                own_model.blocks[1].attn.W_O.mul_(0.5)
            several(browser, ".tokens .chip")[21].click()
            wait(browser, lambda: one(browser, "#notice").is_displayed())
            assert "has changed" in one(browser, "#notice").text
            assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    finally:
        explorer.close()
