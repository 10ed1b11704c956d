import {
  bytes, layerBars, make, promptBar, rankColour, scatter, seconds, shortCount, sparkline, stepStrip,
  triangle, whole,
} from "./charts.js";

const EVERY_MS = 1000;
const KEY = "prefold-api-key";
const STEPS_SHOWN = 60;

const byId = (id) => document.getElementById(id);
let data = null;
let chosen = null; // key of a step that the user looks at; null follows the latest
let timer = 0;

// ------------------------------------------------------------------ data

async function poll() {
  clearTimeout(timer);
  try {
    const key = sessionStorage.getItem(KEY);
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const response = await fetch("dashboard/data", { headers, cache: "no-store" });
    if (response.status === 401) return askForKey(key);
    const body = await response.json();
    if (response.ok) {
      data = body;
      byId("key").hidden = true;
      byId("main").hidden = false;
      byId("main").classList.remove("stale");
      render();
    } else {
      const kind = response.status === 503 ? "warn" : "bad";
      say(kind, kind === "warn" ? "not ready" : `error ${response.status}`, body?.error?.message ?? "");
    }
  } catch {
    say("bad", "no connection", "");
  }
  schedule();
}

function schedule() {
  if (!document.hidden) timer = setTimeout(poll, EVERY_MS);
}

function askForKey(key) {
  sessionStorage.removeItem(KEY);
  byId("key-error").textContent = key ? "That key was not accepted." : "";
  byId("key").hidden = false;
  byId("main").hidden = true;
  say("warn", "needs a key", "");
  byId("key-input").focus();
}

function say(kind, text, problem) {
  byId("status").className = `pill ${kind}`;
  byId("status").textContent = text;
  byId("banner").hidden = !problem;
  byId("banner").textContent = problem;
  if (kind === "bad") byId("main").classList.add("stale");
}

// ------------------------------------------------------------------ page

function render() {
  const { layout } = data;
  say({ ready: "good", starting: "warn", restarting: "warn" }[data.status] ?? "bad", data.status, data.failure ?? "");
  document.title = `${data.num_running} running – Prefold`;
  byId("model").textContent = data.model;
  const axes = ["dp", "pp", "pcp", "tp", "dcp"].filter((axis) => layout[axis] > 1);
  const chips = axes.map((axis) => `${axis.toUpperCase()} ${layout[axis]}`);
  if (layout.ep) chips.push("EP");
  byId("layout").replaceChildren(...(chips.length ? chips : ["1 rank"]).map((chip) => make("span", {}, chip)));
  renderTiles();
  renderStep();
  renderTTFT();
  renderRequests();
  renderWords();
}

function tile(name, value, unit, sub, points, top) {
  const node = byId(`tile-${name}`);
  node.querySelector(".value").replaceChildren(value, unit ? make("small", {}, ` ${unit}`) : "");
  node.querySelector(".sub").textContent = sub;
  node.querySelector(".sub").title = sub;
  const oldest = Math.max(60, ...points.map(([ago]) => ago));
  sparkline(node.querySelector(".spark"), points, Math.min(oldest, data.window_s), top);
}

function renderTiles() {
  const history = data.history.map((sample) => [data.time_s - sample[0], ...sample.slice(1)]);
  const line = (column) => history.map((sample) => [sample[0], sample[column]]);
  const [used, total, cached] = data.blocks;
  const tokens = data.layout.block_tokens;
  const [hits, queries] = data.prefix;
  tile("running", whole(data.num_running), "", `up to ${whole(data.layout.max_num_seqs)}`, line(1));
  tile("waiting", whole(data.num_waiting), "", data.num_waiting ? whyInShort() : "nobody in the queue", line(2));
  tile("kv", `${((100 * used) / Math.max(total, 1)).toFixed(used && used < total / 10 ? 1 : 0)}`, "%",
    `${shortCount(used * tokens)} of ${shortCount(total * tokens)} tokens`, line(3), total);
  const prefill = rates(history, 4), decode = rates(history, 5);
  tile("prefill", shortCount(lately(prefill)), "tokens/s", "mean of 10 s", prefill);
  tile("decode", shortCount(lately(decode)), "tokens/s", "mean of 10 s", decode);
  tile("prefix", queries ? ((100 * hits) / queries).toFixed(0) : "–", queries ? "%" : "",
    queries ? `${shortCount(hits)} of ${shortCount(queries)} tokens` : "nothing looked up yet", []);
  byId("tile-prefix").querySelector(".sub").title += `; ${whole(cached)} blocks can be reused`;
}

function whyInShort() {
  const first = data.requests.find((request) => request.state !== "running" && !request.why.startsWith("behind "));
  const reasons = { blocks: "blocks", budget: "step budget", max_num_seqs: "max_num_seqs" };
  return first ? `first: ${reasons[first.why] ?? first.why}` : "";
}

/** Tokens per second between points of the history: [seconds ago, rate]. */
function rates(history, column) {
  return history.slice(1).map((sample, i) => {
    const before = history[i];
    const passed = before[0] - sample[0];
    return [sample[0], passed > 0 ? Math.max(0, (sample[column] - before[column]) / passed) : 0];
  });
}

function lately(points) {
  const last = points.filter(([ago]) => ago <= 10);
  return last.length ? last.reduce((sum, [, rate]) => sum + rate, 0) / last.length : 0;
}

// ------------------------------------------------------------------ a step

const keyed = (step, flying) => ({ ...step, flying, key: `${step.replica}/${step.step_id}` });

function allSteps() {
  const done = data.steps.map((step) => keyed(step, false));
  const known = new Set(done.map((step) => step.key));
  const flying = data.in_flight.map((step) => keyed(step, true)).filter((step) => !known.has(step.key));
  return [...done, ...flying].slice(-STEPS_SHOWN);
}

/** The step to show: the chosen one, or the latest that holds a prefill, or just the latest. */
function shownStep(steps) {
  const picked = steps.find((step) => step.key === chosen);
  if (!picked) chosen = null;
  return picked ?? steps.findLast((step) => step.rows.length) ?? steps.at(-1);
}

function renderStep() {
  const steps = allSteps();
  const step = shownStep(steps);
  byId("follow").hidden = chosen === null;
  const highest = stepStrip(byId("steps"), steps, step?.key, STEPS_SHOWN, choose);
  byId("steps").setAttribute("aria-valuetext", step ? `step ${step.step_id}` : "none");
  byId("steps-note").textContent = steps.length
    ? `The latest steps, blue with prefill, grey decode only; the longest took ${seconds(highest)}.`
    : "";
  byId("step-title").textContent = step ? stepTitle(step) : "";
  renderPicture(step);
  renderRanks(step);
  const measured = step && !step.flying ? step : steps.findLast((other) => !other.flying);
  renderLayers(measured, steps);
  renderCollectives(measured);
}

function stepTitle(step) {
  const what = [];
  if (step.num_prefill_tokens) what.push(`${whole(step.num_prefill_tokens)} prefill`);
  if (step.num_decode_tokens) what.push(`${whole(step.num_decode_tokens)} decode`);
  const ways = Object.entries(step.ways).map(([way, count]) => `${whole(count)} ${way}`);
  const how = ways.length ? `, context attended: ${ways.join(", ")}` : "";
  const replica = data.layout.dp > 1 ? ` of replica ${step.replica}` : "";
  const time = step.flying ? `running for ${seconds(step.duration_s)}` : seconds(step.duration_s);
  return `Step ${step.step_id}${replica}: ${what.join(" + ")} tokens, ${time}${how}`;
}

function choose(key) {
  chosen = key;
  renderStep();
}

function renderPicture(step) {
  const rows = step?.rows ?? [];
  if (!rows.length) {
    const text = step ? "This step only decodes: a token per request." : "Nothing has been computed yet.";
    byId("picture").replaceChildren(make("p", { class: "empty" }, text));
    byId("triangle-note").textContent = "";
    triangle(byId("triangle"), null, 1);
    return;
  }
  const drawn = rows.map((row) => {
    const end = row.start + row.num_tokens;
    const range = row.start || end < row.num_prompt_tokens
      ? `${whole(row.start)} to ${whole(end)} of ${whole(Math.max(row.num_prompt_tokens, end))} tokens`
      : `${whole(end)} tokens`;
    const names = make("div", { class: "names" }, make("b", { title: row.request_id }, row.request_id), make("span", {}, range));
    return make("div", { class: "row" }, names, promptBar(row, data.layout.pcp));
  });
  byId("picture").replaceChildren(...drawn);
  for (const svg of byId("picture").querySelectorAll("svg")) svg.redraw();
  const largest = rows.reduce((best, row) => (row.num_tokens > best.num_tokens ? row : best));
  const which = rows.length > 1 ? `Attention of ${largest.request_id}` : "Its attention";
  const pale = largest.start ? "; pale: cached context" : "";
  byId("triangle-note").textContent = `${which}: queries downwards, keys to the right, so area is work${pale}.`;
  triangle(byId("triangle"), largest, data.layout.pcp);
}

/** Tokens and causal pairs per rank: as the ranks have counted, or as the parts say while they compute. */
function loads(step) {
  const size = data.layout.pcp;
  if (step.rank_tokens.length) return [step.rank_tokens, step.rank_causal_pairs];
  const tokens = Array(size).fill(0), pairs = Array(size).fill(0);
  for (const row of step.rows) {
    for (const [start, end, rank] of row.parts) {
      tokens[rank] += end - start;
      pairs[rank] += (end * (end + 1) - start * (start + 1)) / 2;
    }
  }
  return [tokens, pairs];
}

function renderRanks(step) {
  if (!step) return byId("ranks").replaceChildren();
  const [tokens, pairs] = loads(step);
  const mean = pairs.reduce((sum, count) => sum + count, 0) / Math.max(pairs.length, 1);
  const heads = ["Rank", "Tokens", "Causal work", "of mean"].map((head) => make("th", { scope: "col" }, head));
  const rows = tokens.map((count, rank) => {
    const chip = make("i");
    chip.style.background = rankColour(rank, tokens.length);
    const share = mean ? `${((100 * pairs[rank]) / mean).toFixed(1)} %` : "–";
    return make("tr", { "data-rank": rank }, make("td", {}, chip, rank), make("td", {}, whole(count)),
      make("td", {}, whole(pairs[rank])), make("td", {}, share));
  });
  byId("ranks").replaceChildren(make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows)));
}

function renderLayers(step, steps) {
  const times = step?.layer_s ?? [];
  const alike = steps.filter(
    (other) => !other.flying && other !== step && other.layer_s.length === times.length &&
      Boolean(other.num_prefill_tokens) === Boolean(step?.num_prefill_tokens),
  );
  const means = alike.length
    ? times.map((_, i) => alike.reduce((sum, other) => sum + other.layer_s[i], 0) / alike.length)
    : [];
  const sum = times.reduce((total, time) => total + time, 0);
  const stage = data.layout.pp > 1 ? ", last pipeline stage" : "";
  byId("layers-note").textContent = step
    ? `step ${step.step_id}: ${seconds(sum)} in ${times.length} layers${stage}; line: mean of ${alike.length} like it`
    : "";
  layerBars(byId("layers"), times, means, data.layout.first_layer);
}

function renderCollectives(step) {
  const times = Object.entries(step?.collective_s ?? {}).sort(([, a], [, b]) => b - a);
  const sum = times.reduce((total, [, time]) => total + time, 0);
  byId("collectives-note").textContent = times.length
    ? `step ${step.step_id}: ${seconds(sum)} of ${seconds(step.forward_s)}, mostly waiting for other ranks`
    : "";
  const rows = times.map(([name, time]) => {
    const calls = step.calls[name], sent = step.bytes_sent[name];
    const facts = [seconds(time)];
    if (calls) facts.push(`${whole(calls)} call${calls > 1 ? "s" : ""}`);
    if (sent) facts.push(bytes(sent));
    return meterRow(name, facts.join(" · "), time / Math.max(step.forward_s, 1e-9));
  });
  byId("collectives").replaceChildren(...(rows.length ? rows : [make("p", { class: "none" }, "One rank talks to nobody.")]));
}

function meterRow(name, facts, share, calm = false) {
  const fill = make("i", calm ? { class: "calm" } : {});
  fill.style.width = `${Math.min(100, 100 * share).toFixed(2)}%`;
  const names = make("div", { class: "names" }, make("b", { title: name }, name), make("span", { title: facts }, facts));
  return make("div", {}, names, make("div", { class: "track" }, fill));
}

// ------------------------------------------------------------------ requests

function renderTTFT() {
  const points = data.finished
    .filter(([, ttft]) => ttft != null)
    .map(([time, ttft, prompt]) => [data.time_s - time, ttft, `${whole(prompt)} prompt tokens: ${seconds(ttft)}`]);
  const sorted = points.map(([, ttft]) => ttft).sort((a, b) => a - b);
  const at = (part) => sorted[Math.min(sorted.length - 1, Math.floor(part * sorted.length))];
  byId("ttft-note").textContent = sorted.length
    ? `median ${seconds(at(0.5))}, 95 % within ${seconds(at(0.95))}; ${whole(sorted.length)} finished in ${data.window_s / 60} min`
    : `nothing finished in the last ${data.window_s / 60} minutes`;
  scatter(byId("ttft"), points, data.window_s);
}

const inPrefill = (request) => request.num_computed_tokens < request.num_prefill_tokens;

function renderRequests() {
  const running = data.requests.filter((request) => request.state === "running");
  running.sort((a, b) => inPrefill(b) - inPrefill(a));
  const prefills = running.filter(inPrefill).length;
  byId("running-note").textContent = running.length
    ? `${whole(prefills)} in prefill, ${whole(running.length - prefills)} generating`
    : "";
  fillList("running", data.num_running, "Nobody asks for anything.", running.map((request) => {
    const { num_computed_tokens: computed, num_prefill_tokens: total } = request;
    const facts = inPrefill(request)
      ? `prefill ${whole(computed)} of ${whole(total)}`
      : `${whole(request.num_prompt_tokens)} + ${whole(request.num_output_tokens)} tokens`;
    return meterRow(request.request_id, facts, computed / Math.max(total, 1), !inPrefill(request));
  }));
  const waiting = data.requests.filter((request) => request.state !== "running");
  byId("queue-note").textContent = data.num_preemptions
    ? `${whole(data.num_preemptions)} preempted since the start`
    : "none preempted since the start";
  fillList("queue", data.num_waiting, "Nobody waits.", waiting.map((request) => {
    const why = request.why.startsWith("behind ") ? "" : `, for ${request.why}`;
    const what = request.state === "preempted" ? "preempted" : seconds(request.wait_s);
    return meterRow(request.request_id, `${whole(request.num_prompt_tokens)} tokens, ${what}${why}`, 0);
  }));
}

function fillList(name, count, none, rows) {
  if (count > rows.length) byId(`${name}-note`).textContent += `; ${rows.length} of ${whole(count)} shown`;
  byId(name).replaceChildren(...(rows.length ? rows : [make("p", { class: "none" }, none)]));
}

function renderWords() {
  const titles = { layout: "Layout", kv_cache: "KV cache", step: "A step", running: "Running", waiting: "Waiting" };
  if (!byId("words").open) return;
  const parts = Object.entries(data.sentences).map(([name, sentences]) =>
    make("section", {}, make("h3", {}, titles[name] ?? name), ...sentences.map((text) => make("p", {}, text))),
  );
  byId("sentences").replaceChildren(...parts);
}

// ------------------------------------------------------------------ events

byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key-input").value.trim());
  byId("key-input").value = "";
  poll();
});
byId("follow").addEventListener("click", () => {
  chosen = null;
  renderStep();
});
byId("steps").addEventListener("keydown", (event) => {
  const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!move || !data) return;
  event.preventDefault();
  const steps = allSteps();
  const at = steps.findIndex((step) => step.key === shownStep(steps)?.key);
  const next = steps[Math.max(0, Math.min(steps.length - 1, at + move))];
  if (next) choose(next.key);
});
byId("words").addEventListener("toggle", () => data && renderWords());
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : poll()));
new ResizeObserver(() => data && !byId("main").hidden && render()).observe(byId("main"));
poll();
