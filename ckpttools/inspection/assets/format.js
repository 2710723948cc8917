// Numbers for people.

const STEPS = ["", "k", "M", "G", "T", "P"];

/** Three digits and the letter of a power of 1000. */
function scaled(number) {
  let power = 0;
  while (number >= 999.5 && power < STEPS.length - 1) {
    number /= 1000;
    power += 1;
  }
  const digits = power === 0 ? 0 : number < 9.995 ? 2 : number < 99.95 ? 1 : 0;
  return `${number.toFixed(digits)} ${STEPS[power]}`;
}

/** 2471645184 -> "2.47 GB" */
const inBytes = (number) => `${scaled(number)}B`;

/** 1235814400 -> "1.24 B", as models are named */
const inBillions = (number) => scaled(number).replace("G", "B").trim();

/** 1235814400 -> "1,235,814,400" */
const grouped = (number) => number.toLocaleString("en-US");

/** 1, "array" -> "1 array" */
const counted = (number, noun) => `${grouped(number)} ${noun}${number === 1 ? "" : "s"}`;

const MINUS = "\u2212";

/** So many digits, as short as they can be written. */
function shortNumber(value, precision = 4) {
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
function percent(share) {
  if (share === 0) return "0 %";
  if (share < 0.0001) return "< 0.01 %";
  return `${(100 * share).toFixed(share < 0.1 ? 2 : 1)} %`;
}

const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹";

/** -10 -> "2⁻¹⁰" */
function powerOfTwo(exponent) {
  const digits = [...String(Math.abs(exponent))].map((digit) => SUPERSCRIPTS[digit]);
  return `2${exponent < 0 ? "⁻" : ""}${digits.join("")}`;
}
