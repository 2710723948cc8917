// Formats numbers.

const UNITS = ["", "k", "M", "G", "T", "P"];

/** Formats a number with three digits and the prefix of a power of 1000. */
function formatScaled(number) {
  let power = 0;
  while (number >= 999.5 && power < UNITS.length - 1) {
    number /= 1000;
    power += 1;
  }
  const digits = power === 0 ? 0 : number < 9.995 ? 2 : number < 99.95 ? 1 : 0;
  return `${number.toFixed(digits)} ${UNITS[power]}`;
}

/** 2471645184 -> "2.47 GB" */
const formatBytes = (number) => `${formatScaled(number)}B`;

/** 1235814400 -> "1.24 B", as models are named */
const formatParameters = (number) => formatScaled(number).replace("G", "B").trim();

/** 1235814400 -> "1,235,814,400" */
const formatInteger = (number) => number.toLocaleString("en-US");

/** 1, "array" -> "1 array" */
const formatCount = (number, noun) => `${formatInteger(number)} ${noun}${number === 1 ? "" : "s"}`;

const MINUS = "\u2212";

/** Formats a number with `precision` digits in its shortest form. */
function formatNumber(value, precision = 4) {
  if (value === null || value === undefined) return "\u2013";
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value).replace("-", MINUS);
  const [mantissa, exponent] = value.toPrecision(precision).split("e");
  const digits = mantissa.includes(".") ? mantissa.replace(/\.?0+$/, "") : mantissa;
  const size = Math.abs(value);
  if (exponent === undefined && size >= 1e-4) return digits.replace("-", MINUS);
  const [start, power] = value.toExponential(precision - 1).split("e");
  return `${start.replace(/\.?0+$/, "")}e${power.replace("+", "")}`.replaceAll("-", MINUS);
}

/** 0.0312 -> "3.12 %" */
function formatPercent(fraction) {
  if (fraction === 0) return "0 %";
  if (fraction < 0.0001) return "< 0.01 %";
  return `${(100 * fraction).toFixed(fraction < 0.1 ? 2 : 1)} %`;
}

const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹";

/** -10 -> "2⁻¹⁰" */
function formatPowerOfTwo(exponent) {
  const digits = [...String(Math.abs(exponent))].map((digit) => SUPERSCRIPTS[digit]);
  return `2${exponent < 0 ? "⁻" : ""}${digits.join("")}`;
}
