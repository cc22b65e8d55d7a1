"use strict";
// Where the page has its data from: the server, or the report that it is a part of.

class NoToken extends Error {}

class LiveData {
  isLive = true;

  async runs() {
    return this.#get("api/runs");
  }

  async view(key, name, parameters = {}) {
    const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => isKnown(value) && value !== ""));
    return this.#get(`api/runs/${encodeURIComponent(key)}/${name}?${query}`);
  }

  async login(token) {
    const answer = await fetch("login", { method: "POST", body: token, credentials: "same-origin" });
    return answer.ok;
  }

  async #get(address) {
    const answer = await fetch(address, { credentials: "same-origin" });
    if (answer.status === 401) throw new NoToken("the token is missing or wrong");
    const text = await answer.text();
    if (!answer.ok) {
      let problem = { what: text };
      try {
        problem = JSON.parse(text);
      } catch {
        // Refused before the dashboard itself was asked.
      }
      throw new Error([problem.what, problem.hint].filter(Boolean).join(": "));
    }
    return JSON.parse(text);
  }
}

class SavedData {
  isLive = false;

  constructor(saved) {
    this.saved = saved;
  }

  async runs() {
    return this.saved.runs;
  }

  async view(key, name, parameters = {}) {
    const views = this.saved.views[key];
    if (!views) throw new Error("this run is not in the report");
    if (name === "series") return views.series[parameters.axis || "step"];
    if (name === "events") return this.#events(views.events, parameters);
    if (name === "logs") return this.#logs(views, parameters);
    return views[name];
  }

  #events(view, { search = "", kinds = "", rank = "" }) {
    const needle = search.toLowerCase();
    const wanted = new Set(kinds.split(",").filter(Boolean));
    const rows = view.events.filter(
      (event) =>
        (!wanted.size || wanted.has(event.kind)) &&
        (rank === "" || event.rank === Number(rank)) &&
        (!needle || event.text.toLowerCase().includes(needle) || event.kind.includes(needle))
    );
    return { ...view, events: rows, matches: rows.length };
  }

  #logs(views, { file, search = "" }) {
    const { logs, files } = views.logs;
    const log = files[file || Object.keys(files)[0]];
    if (!log) return { logs, log: null };
    const lines = log.lines.filter((line) => line.text.toLowerCase().includes(search.toLowerCase()));
    return { logs, log: { ...log, lines, matches: lines.length } };
  }
}

function openData() {
  const saved = document.getElementById("saved");
  return saved ? new SavedData(JSON.parse(saved.textContent)) : new LiveData();
}
