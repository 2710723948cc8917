// Cards of selected arrays: statistics, and the number of elements between powers of two.

const MAX_CARDS = 6;
const INITIAL_CARDS = 3;
const CHART = { width: 340, height: 150, middle: 64, foot: 18 };
// The chart omits the smallest magnitudes if they are at most this fraction of the elements.
const MAX_TAIL = 0.002;
const QUANTILE_LABELS = { 0.01: "1 %", 0.05: "5 %", 0.5: "median", 0.95: "95 %", 0.99: "99 %" };

class Cards {
  constructor(contents) {
    this.contents = contents;
    this.selected = [];
    find("#distributions").hidden = !contents.stats;
    if (!contents.stats) return;
    const withHistogram = Object.keys(contents.histograms).map(Number);
    const largest = withHistogram.sort((a, b) => contents.bytes[b] - contents.bytes[a]);
    const parameters = largest.filter((index) => contents.role[index] === "parameter");
    this.selected = distinctFirst(parameters.length ? parameters : largest, contents.paths).slice(0, INITIAL_CARDS);
    this.draw();
  }

  /** Adds the card of an array, or moves it to the front. */
  choose(index) {
    if (!this.contents.stats) return;
    this.selected = [index, ...this.selected.filter((other) => other !== index)].slice(0, MAX_CARDS);
    this.draw();
    announce(`${this.contents.paths[index]} is shown among the distributions`);
    find(".cards").firstElementChild.scrollIntoView({ block: "nearest" });
  }

  draw() {
    const cards = this.selected.map((index) => this.card(index));
    const none = createElement("p", { className: "note" }, "No array is selected.");
    find(".cards").replaceChildren(...(cards.length ? cards : [none]));
  }

  card(index) {
    const { paths, dtype, shape, bytes, stats, histograms } = this.contents;
    const remove = createElement("button", { type: "button", className: "close", "aria-label": `Remove ${paths[index]}` }, "×");
    remove.addEventListener("click", () => {
      this.selected = this.selected.filter((other) => other !== index);
      this.draw();
    });
    const names = ["min", "max", "mean", "std", "norm", "zeros", "subnormals", "nan", "inf"];
    const numbers = names
      .map((name) => [name.replace("nan", "NaN").replace("inf", "infinite"), stats[name][index]])
      .filter(([name, value]) => value || !["subnormals", "NaN", "infinite"].includes(name))
      .map(([name, value]) => createElement("div", {}, createElement("dt", {}, name), createElement("dd", {}, formatNumber(value))));
    const histogram = histograms[index];
    return createElement(
      "article",
      { className: "card" },
      createElement("header", {}, createElement("h3", {}, ...withLineBreaks(paths[index])), remove),
      createElement("p", { className: "hint" }, `${dtype[index]} ${shape[index]}, ${formatBytes(bytes[index])}`),
      ...(histogram ? [chart(histogram, paths[index]), quantiles(histogram)] : [this.missingChartNote(index)]),
      createElement("dl", { className: "numbers" }, ...numbers),
    );
  }

  missingChartNote(index) {
    const { elements, stats } = this.contents;
    let text = "Only the largest arrays have a chart in this page.";
    if (stats.max[index] === null) text = "A magnitude is too large for float64.";
    if (elements[index] === stats.nan[index] + stats.inf[index]) text = "No element is finite.";
    return createElement("p", { className: "note" }, text);
  }
}

/** Moves arrays whose names differ only in numbers from an earlier one to the end. */
function distinctFirst(indices, paths) {
  const kinds = new Set();
  const first = [];
  const repeated = [];
  for (const index of indices) {
    const kind = paths[index].replace(/\d+/g, "*");
    (kinds.has(kind) ? repeated : first).push(index);
    kinds.add(kind);
  }
  return [...first, ...repeated];
}

/** Returns a name with an opportunity for a line break after each key. */
function withLineBreaks(name) {
  return name.split(/(?<=[./])/).flatMap((part) => [part, createElement("wbr")]);
}

/** Draws bars: upward for positive elements, downward for negative ones. */
function chart(histogram, name) {
  const total = histogram.zeros + histogram.tiny + histogram.bins.reduce((sum, [, negative, positive]) => sum + negative + positive, 0);
  const bins = dropTail(histogram.bins, total);
  const figure = createElement("figure", { className: "chart" });
  if (bins.length === 0) {
    figure.append(createElement("figcaption", {}, emptyChartText(histogram, total)));
    return figure;
  }
  const low = bins[0][0];
  const high = bins[bins.length - 1][0] + 1;
  const maxCount = Math.max(...bins.map(([, negative, positive]) => Math.max(negative, positive)));
  const step = CHART.width / (high - low);
  const bar = (exponent, count, up) => {
    const height = (count / maxCount) * (CHART.middle - 4);
    return createSvgElement("rect", {
      class: up ? "positive" : "negative",
      x: (exponent - low) * step + 0.5,
      y: up ? CHART.middle - height : CHART.middle,
      width: Math.max(1, step - 1),
      height,
    });
  };
  const bars = bins.map(([exponent, negative, positive]) => {
    const text = `${formatPowerOfTwo(exponent)} ≤ |x| < ${formatPowerOfTwo(exponent + 1)}: ${formatPercent(positive / total)} positive, ${formatPercent(negative / total)} negative`;
    const background = createSvgElement("rect", { class: "background", x: (exponent - low) * step, y: 0, width: step, height: 2 * CHART.middle });
    return createSvgElement("g", {}, createSvgElement("title", {}, text), background, bar(exponent, positive, true), bar(exponent, negative, false));
  });
  const svg = createSvgElement(
    "svg",
    { viewBox: `0 0 ${CHART.width} ${CHART.height}`, role: "img", "aria-label": chartLabel(name, histogram, low, high) },
    ...bars,
    createSvgElement("line", { class: "axis", x1: 0, x2: CHART.width, y1: CHART.middle, y2: CHART.middle }),
    createSvgElement("text", { class: "side", x: 2, y: 10 }, "positive"),
    createSvgElement("text", { class: "side", x: 2, y: 2 * CHART.middle - 3 }, "negative"),
    ...ticks(low, high, step),
  );
  figure.append(svg, createElement("figcaption", {}, caption(histogram, bins, total)));
  return figure;
}

function emptyChartText({ zeros, tiny, minExponent }, total) {
  if (!tiny) return "All elements are zero.";
  return `All magnitudes are below ${formatPowerOfTwo(minExponent)}${zeros ? `, ${formatPercent(zeros / total)} zero` : ""}.`;
}

function dropTail(bins, total) {
  let below = 0;
  let from = 0;
  while (from < bins.length && below + bins[from][1] + bins[from][2] <= MAX_TAIL * total) {
    below += bins[from][1] + bins[from][2];
    from += 1;
  }
  return bins.slice(from);
}

/** Half the width of the longest label, 2⁻¹⁰⁷⁴. */
const TICK_MARGIN = 18;

function ticks(low, high, step) {
  const interval = [1, 2, 5, 10, 20, 50, 100, 500].find((candidate) => candidate * step >= 40);
  const marks = [];
  for (let exponent = Math.ceil(low / interval) * interval; exponent <= high; exponent += interval) {
    const x = (exponent - low) * step;
    // Labels at both ends have room on one side only.
    const anchor = x < TICK_MARGIN ? "start" : x > CHART.width - TICK_MARGIN ? "end" : "middle";
    marks.push(createSvgElement("text", { class: "tick", x, y: CHART.height - 5, "text-anchor": anchor }, formatPowerOfTwo(exponent)));
  }
  return marks;
}

function caption(histogram, bins, total) {
  const shown = bins.reduce((sum, [, negative, positive]) => sum + negative + positive, 0);
  const tail = total - histogram.zeros - shown;
  const parts = ["Magnitude |x|"];
  if (histogram.zeros) parts.push(`${formatPercent(histogram.zeros / total)} zero`);
  if (tail) parts.push(`${formatPercent(tail / total)} below ${formatPowerOfTwo(bins[0][0])}`);
  return parts.join(", ");
}

function chartLabel(name, histogram, low, high) {
  const median = histogram.quantiles.find(([fraction]) => fraction === 0.5);
  return `Magnitudes of ${name}, from 2 to the ${low} up to 2 to the ${high}; the median is ${formatNumber(median[1])}`;
}

function quantiles(histogram) {
  const shown = histogram.quantiles.filter(([fraction]) => QUANTILE_LABELS[fraction]);
  const items = shown.map(([fraction, value]) =>
    createElement("div", {}, createElement("dt", {}, QUANTILE_LABELS[fraction]), createElement("dd", {}, formatNumber(value, 3))),
  );
  return createElement("dl", { className: "quantiles", "aria-label": "Quantiles" }, ...items);
}
