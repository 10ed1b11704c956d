// Drawing: everything is made of elements and text nodes, never of markup in strings.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes, children and text. */
export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return node;
}

/** The same in SVG. */
export function draw(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return node;
}

/** Colour of a rank: blue to orange, neighbours a little lighter and darker. */
export function rankColour(rank, size) {
  const turn = size > 1 ? rank / (size - 1) : 0;
  const lightness = 0.72 + (size > 3 ? (rank % 2 ? 0.045 : -0.045) : 0);
  return `oklch(${lightness.toFixed(3)} 0.125 ${(262 - 204 * turn).toFixed(1)})`;
}

export const whole = (number) => Math.round(number).toLocaleString("en");

export function seconds(value) {
  if (value == null || !isFinite(value)) return "–";
  if (value < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 100) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

export function bytes(value) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (value >= size) return `${(value / size).toFixed(value < 10 * size ? 1 : 0)} ${unit}`;
  }
  return `${value} B`;
}

/** Width and height of an SVG in pixels; coordinates are pixels, so that text keeps its size. */
function sizeOf(svg) {
  const box = svg.getBoundingClientRect();
  const size = [Math.max(box.width, 120), Math.max(box.height, 10)];
  svg.setAttribute("viewBox", `0 0 ${size[0]} ${size[1]}`);
  return size;
}

/** A line over time without axes. `points`: [seconds ago, value]. */
export function sparkline(svg, points, span, top) {
  const [width, height] = sizeOf(svg);
  const highest = Math.max(top ?? 0, ...points.map(([, value]) => value), 1e-9);
  const at = points.map(([ago, value]) => [
    (width * (1 - ago / span)).toFixed(1),
    (height - 1 - (height - 4) * (value / highest)).toFixed(1),
  ]);
  if (at.length < 2) return svg.replaceChildren();
  const line = `M${at.map((point) => point.join(" ")).join("L")}`;
  const area = `${line}L${at.at(-1)[0]} ${height}L${at[0][0]} ${height}Z`;
  svg.replaceChildren(draw("path", { class: "area", d: area }), draw("path", { class: "line", d: line }));
}

/** One prompt: what was cached in grey, what the step computes in the ranks' colours. */
export function promptBar(row, size) {
  const end = row.start + row.num_tokens;
  const svg = draw("svg", { role: "img", "aria-label": promptInWords(row) });
  svg.dataset.request = row.request_id;
  svg.redraw = () => {
    const [width] = sizeOf(svg);
    const stub = row.start ? Math.min(Math.max((width * row.start) / end, 74), width * 0.35) : 0;
    const x = (token) => stub + ((width - stub) * (token - row.start)) / row.num_tokens;
    const nodes = [];
    if (stub) {
      nodes.push(draw("rect", { class: "context", x: 0, y: 1, width: stub - 2, height: 24, rx: 4 }));
      nodes.push(draw("text", { class: "on-grey", x: stub / 2 - 1, y: 17 }, shortCount(row.start)));
    }
    for (const [first, last, rank] of row.parts) {
      const left = x(first), wide = x(last) - left;
      const part = draw(
        "rect",
        {
          class: "part", x: left, y: 1, width: Math.max(wide - 1.5, 0.75), height: 24, rx: Math.min(4, wide / 4),
          fill: rankColour(rank, size), "data-rank": rank, "data-start": first, "data-end": last,
        },
        draw("title", {}, `rank ${rank}: tokens ${whole(first)} to ${whole(last)} (${whole(last - first)})`),
      );
      nodes.push(part);
      if (wide > 16) nodes.push(draw("text", { class: "on-rank", x: left + wide / 2 - 0.75, y: 17 }, rank));
    }
    // The whole prompt, thin: how far it has come.
    const total = Math.max(row.num_prompt_tokens, end);
    nodes.push(draw("rect", { class: "todo", x: 0, y: 30, width, height: 4, rx: 2 }));
    nodes.push(draw("rect", { class: "context", x: 0, y: 30, width: (width * end) / total, height: 4, rx: 2 }));
    svg.replaceChildren(...nodes);
  };
  return svg;
}

function promptInWords(row) {
  const parts = row.parts.map(([first, last, rank]) => `rank ${rank} ${whole(first)} to ${whole(last)}`);
  const cached = row.start ? `${whole(row.start)} tokens cached, ` : "";
  return `${row.request_id}: ${cached}${parts.join(", ")}`;
}

export function shortCount(number) {
  if (number < 10000) return whole(number);
  return number < 1e6 ? `${(number / 1e3).toFixed(number < 1e5 ? 1 : 0)}k` : `${(number / 1e6).toFixed(2)}M`;
}

/** Attention of one prompt's step: a row of queries per part, as wide as the keys that they see. */
export function triangle(svg, row, size) {
  const [width, height] = sizeOf(svg);
  if (!row) {
    svg.setAttribute("aria-label", "no prefill in this step");
    return svg.replaceChildren();
  }
  const end = row.start + row.num_tokens;
  const x = (key) => (width * key) / end;
  const y = (query) => (height * (query - row.start)) / row.num_tokens;
  const nodes = row.parts.map(([first, last, rank]) =>
    draw("polygon", {
      points: `0,${y(first)} ${x(first)},${y(first)} ${x(last)},${y(last)} 0,${y(last)}`,
      fill: rankColour(rank, size), stroke: "var(--card)", "stroke-width": 1,
    }),
  );
  if (row.start) {
    const context = { x: 0, y: 0, width: x(row.start), height, fill: "var(--card)", opacity: 0.45 };
    nodes.push(draw("rect", context));
  }
  svg.setAttribute("aria-label", `Attention of ${row.request_id} by rank`);
  svg.replaceChildren(...nodes);
}

/** Durations of steps, the latest at the right. `choose` is called with a step's key. */
export function stepStrip(svg, steps, chosen, capacity, choose) {
  const [width, height] = sizeOf(svg);
  const wide = width / capacity;
  const highest = Math.max(...steps.map((step) => step.duration_s), 1e-9);
  const nodes = [];
  steps.forEach((step, i) => {
    const left = width - (steps.length - i) * wide;
    const tall = Math.max(3, (height - 2) * Math.sqrt(step.duration_s / highest));
    const kind = step.flying ? "flying" : step.num_prefill_tokens ? "prefill" : "decode";
    const shown = step.key === chosen && !step.flying ? "chosen" : kind;
    const hit = draw(
      "rect",
      { class: "hit", x: left, y: 0, width: wide, height },
      draw("title", {}, `step ${step.step_id}: ${seconds(step.duration_s)}`),
    );
    hit.addEventListener("click", () => choose(step.key));
    nodes.push(
      draw("rect", { class: shown, x: left + 0.5, y: height - tall, width: Math.max(wide - 1.5, 1), height: tall, rx: 1.5 }),
      hit,
    );
  });
  svg.replaceChildren(...nodes);
  return highest;
}

/** Times of layers as bars, and the mean of other steps as a line. */
export function layerBars(svg, times, means, firstLayer) {
  const [width, height] = sizeOf(svg);
  const left = 52, bottom = 20, tall = height - bottom - 8;
  const highest = Math.max(...times, ...means, 1e-9);
  const nodes = [0, 0.5, 1].flatMap((part) => {
    const y = height - bottom - tall * part;
    return [
      draw("line", { class: "grid", x1: left, x2: width, y1: y, y2: y }),
      draw("text", { x: left - 8, y: y + 4, "text-anchor": "end" }, part ? seconds(highest * part) : "0"),
    ];
  });
  const wide = (width - left) / Math.max(times.length, 1);
  const gap = Math.min(3, wide / 4);
  const steps = Math.ceil(times.length / Math.max(1, Math.floor((width - left) / 34)));
  times.forEach((time, i) => {
    const high = (tall * time) / highest;
    nodes.push(
      draw(
        "rect",
        { x: left + i * wide + gap / 2, y: height - bottom - high, width: Math.max(wide - gap, 0.5), height: high, rx: Math.min(2, wide / 4) },
        draw("title", {}, `layer ${firstLayer + i}: ${seconds(time)}`),
      ),
    );
    if (i % steps === 0) {
      const place = { x: left + (i + 0.5) * wide, y: height - 5, "text-anchor": "middle" };
      nodes.push(draw("text", place, firstLayer + i));
    }
  });
  if (means.length === times.length && means.length) {
    const at = (i) => height - bottom - (tall * means[i]) / highest;
    const d = means.map((_, i) => `${i ? "H" : "M"}${left + i * wide}${i ? "" : ` ${at(i)}`}V${at(i)}H${left + (i + 1) * wide}`);
    nodes.push(draw("path", { class: "mean", d: d.join("") }));
  }
  svg.setAttribute("aria-label", `Seconds per layer: ${times.map((time) => seconds(time)).join(", ")}`);
  svg.replaceChildren(...nodes);
}

/** Points over the last minutes, seconds on a logarithmic scale. `points`: [seconds ago, seconds, title]. */
export function scatter(svg, points, span) {
  const [width, height] = sizeOf(svg);
  const left = 52, bottom = 20;
  const values = points.map(([, value]) => value);
  const low = Math.floor(Math.log10(Math.max(1e-3, Math.min(...values, 1))));
  const high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(...values, 1e-3))));
  const y = (value) =>
    height - bottom - ((height - bottom - 10) * (Math.log10(Math.max(value, 1e-3)) - low)) / (high - low);
  const nodes = [];
  for (let power = low; power <= high; power++) {
    const at = y(10 ** power);
    nodes.push(draw("line", { class: "grid", x1: left, x2: width, y1: at, y2: at }));
    nodes.push(draw("text", { x: left - 8, y: at + 4, "text-anchor": "end" }, power < 0 ? `${10 ** (3 + power)} ms` : `${10 ** power} s`));
  }
  const x = (ago) => left + (width - left - 8) * (1 - ago / span);
  for (let minute = 0; minute * 60 < span; minute++) {
    const anchor = minute ? "middle" : "end";
    nodes.push(draw("text", { x: x(minute * 60), y: height - 5, "text-anchor": anchor }, minute ? `${minute} min` : "now"));
  }
  for (const [ago, value, title] of points) {
    nodes.push(draw("circle", { cx: x(ago), cy: y(value), r: 4 }, draw("title", {}, title)));
  }
  svg.setAttribute("aria-label", `${points.length} requests`);
  svg.replaceChildren(...nodes);
}
