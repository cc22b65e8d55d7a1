"use strict";
// The page itself: which view is shown, how often it asks for news, keys, theme and token.

const POLL_MILLISECONDS = 2000;
const READING_MILLISECONDS = 250;
const TABS = [
  ["curves", "Curves", CurvesView],
  ["ranks", "Ranks", RanksView],
  ["timeline", "Timeline", TimelineView],
  ["checkpoints", "Checkpoints", CheckpointsView],
  ["plan", "Plan", PlanView],
  ["answers", "Answers", AnswersView],
  ["scores", "Scores", ScoresView],
  ["events", "Events", EventsView],
  ["logs", "Logs", LogsView],
  ["recipe", "Recipe", RecipeView],
];
const KEYS = [
  ["j  k", "next and previous run, or tab of a run"],
  ["Enter", "open the run"],
  ["x", "pick the run, to compare it with others"],
  ["1 … 9, r", "tabs of a run"],
  ["/", "search or filter"],
  ["l", "logarithmic curves"],
  ["s", "more smoothing, then none"],
  ["o", "without outliers"],
  ["+  −  ←  →", "zoom and move the curves"],
  ["0", "reset the zoom"],
  ["t", "dark or light"],
  ["Esc", "back"],
  ["?", "these keys"],
];

class Page {
  constructor() {
    this.data = openData();
    this.runs = [];
    this.overlays = [];
    this.crumb = el("span", { class: "crumb" });
    this.live = el("span", { class: "live" });
    this.main = el("main", {});
    const logo = svg("svg", { viewBox: "0 0 32 32", "aria-hidden": "true" },
      svg("path", { d: "M3 29V15a13 13 0 0 1 26 0v14", fill: "none", stroke: "var(--series-1)", "stroke-width": 3 }),
      svg("path", { d: "M9 23c3-10 5-10 7-5s4 3 7-3", fill: "none", stroke: "var(--series-2)", "stroke-width": 3, "stroke-linecap": "round" }));
    this.top = el("header", { class: "top" },
      el("a", { class: "brand", href: "#/" }, logo, "Trainshed"), this.crumb, el("span", { class: "spread" }), this.live,
      el("button", { type: "button", class: "quiet", "aria-label": "Dark or light", title: "Dark or light (t)", onclick: () => this.switchTheme() }, "◐"),
      el("button", { type: "button", class: "quiet", "aria-label": "Keys", title: "Keys (?)", onclick: () => this.showKeys() }, "?"));
    document.getElementById("app").replaceChildren(this.top, this.main);
    const theme = recall("theme", null);
    if (theme) document.documentElement.dataset.theme = theme;
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.restyle());
    addEventListener("hashchange", () => this.route());
    addEventListener("keydown", (event) => this.onKey(event));
    document.addEventListener("visibilitychange", () => !document.hidden && this.poll());
  }

  async start() {
    const token = location.hash.match(/^#token=(.+)$/);
    if (token) {
      history.replaceState(null, "", location.pathname);
      await this.data.login(decodeURIComponent(token[1]));
    }
    await this.route();
    this.schedule(POLL_MILLISECONDS);
  }

  go(hash) {
    location.hash = hash;
  }

  async route() {
    const [path, query] = location.hash.replace(/^#/, "").split("?");
    const parts = path.split("/").filter(Boolean);
    const parameters = new URLSearchParams(query || "");
    if (this.view) this.view.close();
    tip.hide();
    this.view = null;
    let key = parts[0] === "run" ? parts[1] : null;
    try {
      if (!this.runs.length || !key) this.runs = (await this.data.runs()).runs;
    } catch (error) {
      return this.showProblem(error);
    }
    // A report or a page of one run begins with it.
    if (!parts.length && this.runs.length === 1) key = this.runs[0].key;
    this.key = key;
    if (!key) {
      this.tab = null;
      this.overlays = [];
      this.crumb.textContent = "";
      document.title = "Trainshed";
      this.view = new RunsView(this);
      this.main.replaceChildren(this.view.root);
    } else {
      const [tab, , View] = TABS.find(([name]) => name === (parts[2] || "curves")) || TABS[0];
      this.tab = tab;
      this.overlays = (parameters.get("with") || "").split(",").filter(Boolean);
      this.head = el("div", {});
      this.body = el("div", {});
      this.view = new View(this, parameters);
      this.body.append(this.view.root);
      this.main.replaceChildren(this.head, this.tabs(), this.body);
    }
    scrollTo(0, 0);
    await this.poll(true);
  }

  tabs() {
    const query = this.overlays.length ? `?with=${this.overlays.join(",")}` : "";
    return el("nav", { class: "tabs" }, TABS.map(([name, text]) => el("a", { href: `#/run/${this.key}/${name}${query}`, "aria-current": name === this.tab ? "page" : null }, text)));
  }

  otherRuns() {
    return this.runs.filter((run) => run.key !== this.key);
  }

  setOverlays(keys) {
    this.go(`#/run/${this.key}/${this.tab}${keys.length ? `?with=${keys.join(",")}` : ""}`);
  }

  // The next look: soon while a long run is still being read.
  schedule(milliseconds) {
    clearTimeout(this.timer);
    if (this.data.isLive) this.timer = setTimeout(() => this.poll(), milliseconds);
  }

  async poll(always = false) {
    if (document.hidden && !always) return this.schedule(POLL_MILLISECONDS);
    const view = this.view;
    if (!view) return;
    let reading = false;
    try {
      if (!this.key) reading = await view.refresh();
      else {
        const shown = await Promise.all([this.key, ...this.overlays].map((key) => this.data.view(key, "summary")));
        if (view !== this.view) return;
        reading = shown.some((run) => run.read !== null);
        this.showHead(shown[0]);
        const version = JSON.stringify(shown.map((run) => [run.version, run.state]));
        // A timeline moves with the clock, a log grows without an event.
        const moves = shown[0].state === "running" && ["timeline", "logs"].includes(this.tab);
        if (always || version !== view.version || moves) await view.refresh();
        view.version = version;
      }
      if (view === this.view) this.showLive(null);
    } catch (error) {
      if (view === this.view) always || error instanceof NoToken ? this.showProblem(error) : this.showLive(error);
    }
    this.schedule(reading ? READING_MILLISECONDS : POLL_MILLISECONDS);
  }

  showLive(error) {
    if (!this.data.isLive) this.live.replaceChildren(el("span", {}, "saved report"));
    else if (error) this.live.replaceChildren(el("i", { class: "dot bad", title: error.message }), el("span", {}, "no answer"));
    else this.live.replaceChildren(el("i", { class: "dot alive", title: "live" }), el("span", {}, "live"));
  }

  showHead(run) {
    this.crumb.textContent = `/ ${run.run}`;
    document.title = `${run.step !== null ? `${figures.count(run.step)} · ` : ""}${run.run} · Trainshed`;
    const facts = [
      run.parameters ? `${figures.short(run.parameters)} parameters` : null,
      run.world_size ? `${figures.count(run.world_size)} × ${run.device || "rank"}` : null,
      run.layout, run.engine, run.cluster !== "local" ? run.cluster : null,
      run.attempt > 1 ? `attempt ${run.attempt}` : null,
      run.began ? `begun ${figures.clock(run.began).slice(0, 16)}` : null,
    ].filter(Boolean);
    const share = run.steps && run.step !== null ? run.step / run.steps : null;
    const tile = (label, value, small, extra) => el("div", {}, el("div", { class: "label" }, label), el("div", { class: "value" }, value, small ? el("small", {}, small) : null), extra);
    const elapsed = run.began ? (run.state === "running" ? Date.now() / 1000 : run.updated) - run.began : null;
    const tiles = [
      tile("Step", run.step !== null ? figures.count(run.step) : run.phase || NONE, run.steps && run.step !== null ? `of ${run.steps < 1e5 ? figures.count(run.steps) : figures.short(run.steps)}` : "", share !== null ? el("div", { class: "bar" }, el("i", { style: { width: `${Math.min(100, 100 * share)}%` } })) : null),
      run.state === "running" && isKnown(run.eta_seconds) ? tile("Left", figures.rough(run.eta_seconds)) : tile(run.state === "running" ? "Since" : "Took", figures.rough(elapsed)),
      tile("Loss", figures.loss(run.loss)),
      isKnown(run.validation_loss) ? tile("Validation", figures.loss(run.validation_loss)) : null,
      tile("Tokens", figures.short(run.tokens)),
      tile(run.device === "cpu" ? "Tokens/s/rank" : "Tokens/s/GPU", figures.count(run.tokens_per_second_per_gpu)),
      tile("MFU", figures.percent(run.mfu)),
      tile("Step time", figures.seconds(run.step_seconds)),
      isKnown(run.memory_gib) ? tile("Memory", figures.gib(run.memory_gib)) : null,
    ].filter(Boolean);
    const notices = [
      run.error ? el("div", { class: "notice" }, run.error) : null,
      run.problem ? el("div", { class: "notice warn" }, `Not everything can be read. ${run.problem}`) : null,
      run.read !== null ? el("div", { class: "notice plain" }, `Reading its events: ${figures.percent(run.read, 0)}`) : null,
    ].filter(Boolean);
    this.head.replaceChildren(
      el("div", { class: "run-head" }, el("h1", {}, run.name, el("span", { class: "id" }, run.id)), stateBadge(run), run.alarms ? el("a", { class: "warn-text", href: `#/run/${this.key}/events` }, `${run.alarms} ${run.alarms === 1 ? "alarm" : "alarms"}`) : null),
      el("p", { class: "run-facts" }, facts.map((fact) => el("span", {}, fact))),
      ...notices,
      el("div", { class: "headline" }, tiles)
    );
  }

  showProblem(error) {
    if (error instanceof NoToken) return this.askToken();
    this.main.replaceChildren(el("div", { class: "card" }, emptyState("This cannot be shown", error.message, " ", el("a", { href: "#/" }, "All runs"))));
  }

  askToken() {
    const field = el("input", { type: "password", autocomplete: "current-password", "aria-label": "Token", placeholder: "token" });
    const problem = el("p", { class: "bad-text" });
    const form = el("form", {
      class: "login",
      onsubmit: async (event) => {
        event.preventDefault();
        if (await this.data.login(field.value.trim())) this.route();
        else problem.textContent = "This is not the token.";
      },
    }, field, el("button", { type: "submit" }, "Open"));
    this.main.replaceChildren(el("div", { class: "card" }, el("div", { class: "empty" }, el("strong", {}, "A token is needed"), el("p", {}, el("code", {}, "trainshed dash"), " has printed it where it was started."), form, problem)));
    field.focus();
  }

  switchTheme() {
    const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    document.documentElement.dataset.theme = dark ? "light" : "dark";
    remember("theme", document.documentElement.dataset.theme);
    this.restyle();
  }

  restyle() {
    if (this.view) this.view.restyle();
  }

  showKeys() {
    const dialog = el("dialog", { onclose: () => dialog.remove(), onclick: (event) => event.target === dialog && dialog.close() },
      el("h2", {}, "Keys"),
      el("table", {}, KEYS.map(([keys, text]) => el("tr", {}, el("td", { class: "nowrap" }, keys.split("  ").map((key) => [el("kbd", {}, key), " "])), el("td", {}, text)))));
    document.body.append(dialog);
    dialog.showModal();
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (document.querySelector("dialog")) {
      if (event.key === "?") document.querySelector("dialog").close();
      return;
    }
    const field = event.target.closest?.("input, select, textarea");
    if (field && field.type !== "checkbox") {
      if (event.key === "Escape") field.blur();
      return;
    }
    const action = this.actions()[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }

  actions() {
    const actions = { "?": () => this.showKeys(), t: () => this.switchTheme(), "/": () => this.main.querySelector('input[type="search"]')?.focus() };
    if (!this.key) {
      const { view } = this;
      return view ? { ...actions, j: () => view.move(1), k: () => view.move(-1), ArrowDown: () => view.move(1), ArrowUp: () => view.move(-1), Enter: () => view.open(), x: () => view.pick() } : actions;
    }
    actions.Escape = () => this.go("#/runs");
    const place = TABS.findIndex(([name]) => name === this.tab);
    const openTab = (index) => {
      const [name] = TABS[(index + TABS.length) % TABS.length];
      this.go(`#/run/${this.key}/${name}${this.overlays.length ? `?with=${this.overlays.join(",")}` : ""}`);
    };
    actions.j = () => openTab(place + 1);
    actions.k = () => openTab(place - 1);
    // The digits end before the last tab, the recipe.
    TABS.forEach((_, index) => (actions[index < 9 ? String(index + 1) : "r"] = () => openTab(index)));
    if (this.view instanceof CurvesView) {
      const curves = this.view;
      Object.assign(actions, {
        l: () => curves.toggleLog(),
        o: () => ((curves.robust = !curves.robust), remember("robust", curves.robust), curves.showTools(), curves.draw()),
        s: () => ((curves.weight = { 0: 0.6, 0.6: 0.9, 0.9: 0.97 }[curves.weight] || 0), remember("smoothing", curves.weight), curves.showTools(), curves.draw()),
        "+": () => curves.scaleZoom(0.5),
        "=": () => curves.scaleZoom(0.5),
        "-": () => curves.scaleZoom(2),
        ArrowLeft: () => curves.moveZoom(-0.25),
        ArrowRight: () => curves.moveZoom(0.25),
        0: () => curves.setZoom(null),
      });
    }
    return actions;
  }
}

const page = new Page();
page.start();
