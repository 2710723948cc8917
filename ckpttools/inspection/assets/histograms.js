// Cards of chosen arrays: their statistics, and how many elements lie between powers of two.

const MOST_CARDS = 6;
const AT_FIRST = 3;
const CHART = { width: 340, height: 150, middle: 64, foot: 18 };
// Magnitudes below which hardly an element lies are left out of the chart.
const TAIL = 0.002;
const SHOWN_QUANTILES = { 0.01: "1 %", 0.05: "5 %", 0.5: "median", 0.95: "95 %", 0.99: "99 %" };

class Cards {
  constructor(contents) {
    this.contents = contents;
    this.chosen = [];
    find("#distributions").hidden = !contents.stats;
    if (!contents.stats) return;
    const having = Object.keys(contents.histograms).map(Number);
    const largest = having.sort((a, b) => contents.bytes[b] - contents.bytes[a]);
    const parameters = largest.filter((index) => contents.role[index] === "parameter");
    this.chosen = differing(parameters.length ? parameters : largest, contents.paths).slice(0, AT_FIRST);
    this.draw();
  }

  /** Puts an array in front. */
  choose(index) {
    if (!this.contents.stats) return;
    this.chosen = [index, ...this.chosen.filter((each) => each !== index)].slice(0, MOST_CARDS);
    this.draw();
    say(`${this.contents.paths[index]} is shown among the distributions`);
    find(".cards").firstElementChild.scrollIntoView({ block: "nearest" });
  }

  draw() {
    const cards = this.chosen.map((index) => this.card(index));
    const none = made("p", { className: "note" }, "No array is chosen.");
    find(".cards").replaceChildren(...(cards.length ? cards : [none]));
  }

  card(index) {
    const { paths, dtype, shape, bytes, stats, histograms } = this.contents;
    const remove = made("button", { type: "button", className: "close", "aria-label": `Remove ${paths[index]}` }, "×");
    remove.addEventListener("click", () => {
      this.chosen = this.chosen.filter((each) => each !== index);
      this.draw();
    });
    const names = ["min", "max", "mean", "std", "norm", "zeros", "subnormals", "nan", "inf"];
    const numbers = names
      .map((name) => [name.replace("nan", "NaN").replace("inf", "infinite"), stats[name][index]])
      .filter(([name, value]) => value || !["subnormals", "NaN", "infinite"].includes(name))
      .map(([name, value]) => made("div", {}, made("dt", {}, name), made("dd", {}, shortNumber(value))));
    const histogram = histograms[index];
    return made(
      "article",
      { className: "card" },
      made("header", {}, made("h3", {}, ...breakable(paths[index])), remove),
      made("p", { className: "hint" }, `${dtype[index]} ${shape[index]}, ${inBytes(bytes[index])}`),
      ...(histogram ? [chart(histogram, paths[index]), quantiles(histogram)] : [this.without(index)]),
      made("dl", { className: "numbers" }, ...numbers),
    );
  }

  without(index) {
    const { elements, stats } = this.contents;
    let text = "Only the largest arrays have a chart in this page.";
    if (stats.max[index] === null) text = "A magnitude is too large for float64.";
    if (elements[index] === stats.nan[index] + stats.inf[index]) text = "No element is finite.";
    return made("p", { className: "note" }, text);
  }
}

/** Indices of arrays whose names differ in more than numbers, in order; the others behind them. */
function differing(indices, paths) {
  const seen = new Set();
  const first = [];
  const again = [];
  for (const index of indices) {
    const kind = paths[index].replace(/\d+/g, "*");
    (seen.has(kind) ? again : first).push(index);
    seen.add(kind);
  }
  return [...first, ...again];
}

/** A name that may be broken after each key. */
function breakable(name) {
  return name.split(/(?<=[./])/).flatMap((part) => [part, made("wbr")]);
}

/** Bars upwards for positive elements, downwards for negative ones. */
function chart(histogram, name) {
  const total = histogram.zeros + histogram.tiny + histogram.bins.reduce((sum, [, negative, positive]) => sum + negative + positive, 0);
  const bins = withoutTail(histogram.bins, total);
  const figure = made("figure", { className: "chart" });
  if (bins.length === 0) {
    figure.append(made("figcaption", {}, withoutBars(histogram, total)));
    return figure;
  }
  const low = bins[0][0];
  const high = bins[bins.length - 1][0] + 1;
  const most = Math.max(...bins.map(([, negative, positive]) => Math.max(negative, positive)));
  const step = CHART.width / (high - low);
  const bar = (exponent, count, up) => {
    const height = (count / most) * (CHART.middle - 4);
    return drawn("rect", {
      class: up ? "positive" : "negative",
      x: (exponent - low) * step + 0.5,
      y: up ? CHART.middle - height : CHART.middle,
      width: Math.max(1, step - 1),
      height,
    });
  };
  const bars = bins.map(([exponent, negative, positive]) => {
    const words = `${powerOfTwo(exponent)} ≤ |x| < ${powerOfTwo(exponent + 1)}: ${percent(positive / total)} positive, ${percent(negative / total)} negative`;
    const whole = drawn("rect", { class: "whole", x: (exponent - low) * step, y: 0, width: step, height: 2 * CHART.middle });
    return drawn("g", {}, drawn("title", {}, words), whole, bar(exponent, positive, true), bar(exponent, negative, false));
  });
  const svg = drawn(
    "svg",
    { viewBox: `0 0 ${CHART.width} ${CHART.height}`, role: "img", "aria-label": spoken(name, histogram, low, high) },
    ...bars,
    drawn("line", { class: "axis", x1: 0, x2: CHART.width, y1: CHART.middle, y2: CHART.middle }),
    drawn("text", { class: "side", x: 2, y: 10 }, "positive"),
    drawn("text", { class: "side", x: 2, y: 2 * CHART.middle - 3 }, "negative"),
    ...ticks(low, high, step),
  );
  figure.append(svg, made("figcaption", {}, caption(histogram, bins, total)));
  return figure;
}

function withoutBars({ zeros, tiny, least }, total) {
  if (!tiny) return "All elements are zero.";
  return `All magnitudes are below ${powerOfTwo(least)}${zeros ? `, ${percent(zeros / total)} zero` : ""}.`;
}

function withoutTail(bins, total) {
  let below = 0;
  let from = 0;
  while (from < bins.length && below + bins[from][1] + bins[from][2] <= TAIL * total) {
    below += bins[from][1] + bins[from][2];
    from += 1;
  }
  return bins.slice(from);
}

/** Half of the longest label, 2⁻¹⁰⁷⁴. */
const TICK_ROOM = 18;

function ticks(low, high, step) {
  const every = [1, 2, 5, 10, 20, 50, 100, 500].find((each) => each * step >= 40);
  const marks = [];
  for (let exponent = Math.ceil(low / every) * every; exponent <= high; exponent += every) {
    const x = (exponent - low) * step;
    // At both ends there is room on one side only.
    const anchor = x < TICK_ROOM ? "start" : x > CHART.width - TICK_ROOM ? "end" : "middle";
    marks.push(drawn("text", { class: "tick", x, y: CHART.height - 5, "text-anchor": anchor }, powerOfTwo(exponent)));
  }
  return marks;
}

function caption(histogram, bins, total) {
  const shown = bins.reduce((sum, [, negative, positive]) => sum + negative + positive, 0);
  const left = total - histogram.zeros - shown;
  const words = ["Magnitude |x|"];
  if (histogram.zeros) words.push(`${percent(histogram.zeros / total)} zero`);
  if (left) words.push(`${percent(left / total)} below ${powerOfTwo(bins[0][0])}`);
  return words.join(", ");
}

function spoken(name, histogram, low, high) {
  const middle = histogram.quantiles.find(([share]) => share === 0.5);
  return `Magnitudes of ${name}, from 2 to the ${low} up to 2 to the ${high}; the median is ${shortNumber(middle[1])}`;
}

function quantiles(histogram) {
  const shown = histogram.quantiles.filter(([share]) => SHOWN_QUANTILES[share]);
  const items = shown.map(([share, value]) =>
    made("div", {}, made("dt", {}, SHOWN_QUANTILES[share]), made("dd", {}, shortNumber(value, 3))),
  );
  return made("dl", { className: "quantiles", "aria-label": "Quantiles" }, ...items);
}
