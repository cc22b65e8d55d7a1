"""The driver creates stages in order, and may be killed and started again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from support.clusters.kubernetes_jobs import NAME, cluster_of, job_of, stages_of, train_alone
from support.clusters.kubernetes_schemas import read_documents
from support.clusters.kubernetes_server import TOKEN, KubernetesServer, kubernetes_server
from trainshed.errors import InputError, TrainshedError
from trainshed.launch.kubernetes.api import KubeApi
from trainshed.launch.kubernetes.driver import drive
from trainshed.launch.kubernetes.kinds import CONFIG_MAP
from trainshed.launch.kubernetes.render import render
from trainshed.reporting import SILENT

STAGES = [f"jobs/{NAME}-fetch", f"jobs/{NAME}-tokenise", f"jobsets/{NAME}"]
DONE = {"jobs": "Complete", "jobsets": "Completed"}


@pytest.fixture
def server() -> Iterator[KubernetesServer]:
    with kubernetes_server() as found:
        yield found


@pytest.fixture
def manifests(tmp_path: Path) -> Path:
    """The files that the driver's ConfigMap holds."""
    cluster = cluster_of({"kubernetes": {"namespace": "ml"}})
    objects = read_documents(render(job_of(cluster, stages=stages_of(cluster, nodes=2))).text())
    (texts,) = [each["data"] for each in objects if "-stages-" in each["metadata"]["name"]]
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return tmp_path


class Notes:
    """What was reported, and a hook for each."""

    def __init__(self, on_note: Callable[[str], None] = lambda _: None) -> None:
        self.texts: list[str] = []
        self._on_note = on_note

    def note(self, text: str) -> None:
        self.texts.append(text)
        self._on_note(text)

    warn = note
    task = SILENT.task


def api_of(server: KubernetesServer) -> KubeApi:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    return KubeApi(httpx2.Client(base_url=server.url, headers=headers, trust_env=False), "ml")


def end(server: KubernetesServer, stage: str, condition: str | None = None, **status: Any) -> None:
    """Write what the stage's controller would."""
    plural = stage.partition("/")[0]
    (path,) = [path for path in server.objects if path.endswith(stage)]
    listed = [{"type": condition or DONE[plural], "status": "True", "message": status.pop("message", "")}]
    server.objects[path]["status"] = {"conditions": listed} | status


def run(server: KubernetesServer, manifests: Path, notes: Notes, api_retry_seconds: float = 5.0) -> None:
    with api_of(server) as api:
        drive(api, manifests, reporter=notes, poll_seconds=0.02, api_retry_seconds=api_retry_seconds)


def created(server: KubernetesServer) -> list[str]:
    return [stage for stage in STAGES if any(path.endswith(stage) for path in server.objects)]


def test_each_stage_is_created_when_the_one_before_has_succeeded(server: KubernetesServer, manifests: Path) -> None:
    seen: list[list[str]] = []

    def controller(text: str) -> None:
        if "is created" in text:
            seen.append(created(server))
            end(server, seen[-1][-1])

    notes = Notes(controller)
    run(server, manifests, notes)
    assert seen == [STAGES[:1], STAGES[:2], STAGES]
    assert notes.texts == [
        f"fetch: Job/{NAME}-fetch is created",
        "fetch: done",
        f"tokenise: Job/{NAME}-tokenise is created",
        "tokenise: done",
        f"train: JobSet/{NAME} is created",
        "train: done",
    ]
    assert b"".join(server.bodies).decode() == "".join(file.read_text() for file in sorted(manifests.glob("*.yaml")))


def owned_run(server: KubernetesServer, manifests: Path, owner: str, notes: Notes) -> None:
    with api_of(server) as api:
        drive(api, manifests, owner=owner, reporter=notes, poll_seconds=0.02, api_retry_seconds=5.0)


def test_stages_are_deleted_with_the_config_map_that_they_are_from(server: KubernetesServer, manifests: Path) -> None:
    folder = "/api/v1/namespaces/ml/configmaps"
    server.put(f"{folder}/mine", {})
    server.put(f"{folder}/other", {})

    def controller(text: str) -> None:
        if "is created" in text:
            end(server, next(stage for stage in STAGES if stage.endswith(f"/{text.split()[1].partition('/')[2]}")))

    owned_run(server, manifests, "mine", Notes(controller))
    assert created(server) == STAGES
    with api_of(server) as api:
        api.delete(CONFIG_MAP, "other")
        assert created(server) == STAGES
        api.delete(CONFIG_MAP, "mine")  # `helm uninstall`, `trainshed cancel`
    assert created(server) == []


def test_what_an_earlier_release_left_is_replaced_and_what_is_its_own_stays(
    server: KubernetesServer, manifests: Path
) -> None:
    folder = "/api/v1/namespaces/ml/configmaps"
    server.put(f"{folder}/before", {})
    server.put(f"{folder}/after", {})

    def controller(text: str) -> None:
        if "is created" in text:
            end(server, next(stage for stage in STAGES if stage.endswith(f"/{text.split()[1].partition('/')[2]}")))

    owned_run(server, manifests, "before", Notes(controller))
    uids = {path: each["metadata"]["uid"] for path, each in server.objects.items() if "/configmaps/" not in path}
    again = Notes(controller)
    owned_run(server, manifests, "before", again)
    assert not any("earlier release" in text for text in again.texts)
    assert all(server.objects[path]["metadata"]["uid"] == uid for path, uid in uids.items())
    upgraded = Notes(controller)
    owned_run(server, manifests, "after", upgraded)
    assert f"train: JobSet/{NAME} of an earlier release is replaced" in upgraded.texts
    assert not any(server.objects[path]["metadata"]["uid"] == uid for path, uid in uids.items())
    server.objects.pop(f"{folder}/before")
    with pytest.raises(TrainshedError, match="the ConfigMap before is gone"):
        owned_run(server, manifests, "before", Notes())


def test_a_stage_that_fails_ends_the_line_and_later_ones_are_never_created(
    server: KubernetesServer, manifests: Path
) -> None:
    def controller(text: str) -> None:
        if "fetch" in text and "is created" in text:
            end(server, STAGES[0], "Failed", message="Job has reached the specified backoff limit")

    with pytest.raises(TrainshedError) as caught:
        run(server, manifests, Notes(controller))
    assert caught.value.what == "fetch failed: Job has reached the specified backoff limit."
    assert caught.value.exit_code == 1
    assert created(server) == STAGES[:1]


def test_a_driver_that_was_killed_goes_on_where_it_was(server: KubernetesServer, manifests: Path) -> None:
    class Killed(Exception):
        pass

    def one_stage_and_a_half(text: str) -> None:
        if text.endswith("fetch is created"):
            end(server, STAGES[0])
        if text.startswith("tokenise"):
            raise Killed

    with pytest.raises(Killed):
        run(server, manifests, Notes(one_stage_and_a_half))
    uids = {path: each["metadata"]["uid"] for path, each in server.objects.items()}

    def controller(text: str) -> None:
        if "tokenise is created" in text:
            end(server, STAGES[1])
        if "JobSet" in text:
            end(server, STAGES[2])

    second = Notes(controller)
    run(server, manifests, second)
    assert second.texts[1] == "fetch: done"
    assert all(server.objects[path]["metadata"]["uid"] == uid for path, uid in uids.items())
    assert created(server) == STAGES


def test_an_api_server_that_is_away_for_a_while_is_waited_for(server: KubernetesServer, manifests: Path) -> None:
    def controller(text: str) -> None:
        if "is created" in text:
            server.failures += [503, 500]
            end(server, created(server)[-1])

    notes = Notes(controller)
    run(server, manifests, notes)
    assert created(server) == STAGES
    assert any("asking again" in text for text in notes.texts)


def test_what_is_refused_is_not_tried_again(server: KubernetesServer, manifests: Path) -> None:
    server.forbidden.add("jobsets")

    def controller(text: str) -> None:
        if "Job/" in text:
            end(server, created(server)[-1])

    with pytest.raises(TrainshedError, match="is forbidden"):
        run(server, manifests, Notes(controller))
    assert server.requests.count(f"PATCH /apis/jobset.x-k8s.io/v1alpha2/namespaces/ml/jobsets/{NAME}") == 1
    del server.kinds["/apis/batch/v1"]
    with pytest.raises(InputError, match=r"the cluster has no Job \(batch/v1\)"):
        run(server, manifests, Notes())


def test_a_stage_that_somebody_deletes_ends_the_driver(server: KubernetesServer, manifests: Path) -> None:
    with pytest.raises(TrainshedError, match=f"fetch: Job/{NAME}-fetch was deleted before its end"):
        run(server, manifests, Notes(lambda _: server.objects.clear()))


def test_what_a_stage_waits_for_is_told_once(server: KubernetesServer, manifests: Path) -> None:
    def controller(text: str) -> None:
        if text.startswith("fetch: None of 1 pods"):
            threading.Timer(0.2, end, (server, STAGES[0])).start()
        elif "is created" in text and "fetch" not in text:
            end(server, created(server)[-1])

    notes = Notes(controller)
    run(server, manifests, notes)
    assert notes.texts.count("fetch: None of 1 pods has a node yet.") == 1


TRAIN = f"/apis/batch/v1/namespaces/ml/jobs/{NAME}"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """The manifests of a training alone, as a plain Job that may fail twice."""
    cluster = cluster_of({"kubernetes": {"namespace": "ml", "kind": "job"}})
    objects = read_documents(render(job_of(cluster, stages=train_alone(restarts=2))).text())
    (texts,) = [each["data"] for each in objects if "-stages-" in each["metadata"]["name"]]
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return tmp_path


class Controller:
    """Ends each Job that is made, as a list says; `uids` are those that were there."""

    def __init__(self, server: KubernetesServer, *reasons: str) -> None:
        self.server, self.reasons, self.uids = server, list(reasons), []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Controller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.005):
            found = self.server.objects.get(TRAIN)
            if found is not None and found["metadata"]["uid"] not in self.uids:
                self.uids.append(found["metadata"]["uid"])
                reason = self.reasons.pop(0)
                kind = "Failed" if reason else "Complete"
                found["status"] = {
                    "conditions": [{"type": kind, "status": "True", "reason": reason, "message": reason}]
                }


def test_a_plain_job_that_fails_is_made_anew_as_it_was_until_it_is_done(server: KubernetesServer, plain: Path) -> None:
    notes = Notes()
    with Controller(server, "BackoffLimitExceeded", "DeadlineExceeded", "BackoffLimitExceeded", "") as made:
        run(server, plain, notes)
    assert len(set(made.uids)) == 4
    assert [text for text in notes.texts if "anew" in text] == [
        "train: it failed (1 of 2 restarts); it is made anew",
        "train: its time was up; it is made anew",
        "train: it failed (2 of 2 restarts); it is made anew",
    ]
    sent = [body for body in server.bodies if b"kind: Job" in body]
    assert len(set(sent)) == 1, "what is created again is what was rendered"
    assert server.objects[TRAIN]["metadata"]["annotations"]["trainshed.io/restarts"] == "2"


@pytest.mark.parametrize(
    "reasons", [["PodFailurePolicy"], ["BackoffLimitExceeded", "BackoffLimitExceeded", "BackoffLimitExceeded"]]
)
def test_wrong_input_is_not_tried_again_and_restarts_have_an_end(
    server: KubernetesServer, plain: Path, reasons: list[str]
) -> None:
    with Controller(server, *reasons) as made, pytest.raises(TrainshedError, match=f"train failed: {reasons[-1]}"):
        run(server, plain, Notes())
    assert len(made.uids) == len(reasons)


def test_a_driver_that_was_killed_while_it_made_a_job_anew_counts_it_once(
    server: KubernetesServer, plain: Path
) -> None:
    class Killed(Exception):
        pass

    def dies(text: str) -> None:
        if "made anew" in text:
            raise Killed

    for counted in (False, True):
        server.objects.clear()
        with Controller(server, "BackoffLimitExceeded", "") as made:
            with pytest.raises(Killed):
                run(server, plain, Notes(dies))
            if counted:  # and not yet deleted
                (path,) = server.paths("/services/")
                annotations = {"trainshed.io/restarts": "1", "trainshed.io/restarted": made.uids[0]}
                server.annotated[server.objects[path]["metadata"]["uid"]] = annotations
                server.objects[path]["metadata"]["annotations"] = dict(annotations)
            run(server, plain, Notes())
        assert server.objects[TRAIN]["metadata"]["annotations"]["trainshed.io/restarts"] == "1"


def test_pods_of_the_last_start_are_waited_for(server: KubernetesServer, plain: Path) -> None:
    pod = "/api/v1/namespaces/ml/pods/slow"

    def leaves_late(text: str) -> None:
        if "made anew" in text:
            labels = {"batch.kubernetes.io/controller-uid": server.objects[TRAIN]["metadata"]["uid"]}
            server.put(pod, {"metadata": {"labels": labels}})
            threading.Timer(0.3, ends).start()

    def ends() -> None:
        there.append(TRAIN in server.objects)
        del server.objects[pod]

    there: list[bool] = []
    with Controller(server, "BackoffLimitExceeded", ""):
        run(server, plain, Notes(leaves_late))
    assert there == [False], "the next start began beside the last one"
