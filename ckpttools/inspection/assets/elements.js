// Making and finding elements; the one tooltip.

const find = (selector) => document.querySelector(selector);

/** An element with properties and children; names come from files, so nothing is ever parsed as HTML. */
function made(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element && name !== "style") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

function drawn(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** For readers of screens. */
function say(text) {
  find("#said").textContent = text;
}

const EDGE = 8;

/** Shows lines of text beside an element, inside the window. */
function showTip(element, lines) {
  const tip = find("#tip");
  tip.replaceChildren(...lines.map((line, k) => made("div", { className: k ? "" : "first" }, line)));
  tip.hidden = false;
  const place = element.getBoundingClientRect();
  const box = tip.getBoundingClientRect();
  const left = Math.min(place.left, window.innerWidth - box.width - EDGE);
  const above = place.top - box.height - EDGE;
  tip.style.left = `${Math.max(EDGE, left)}px`;
  tip.style.top = `${above < EDGE ? place.bottom + EDGE : above}px`;
}

function hideTip() {
  find("#tip").hidden = true;
}

/** Shows a tip for elements within `container` that `linesOf` knows, under the pointer or in focus. */
function tipsWithin(container, linesOf) {
  const show = (event) => {
    const element = event.target.closest("[data-tip]");
    if (element) showTip(element, linesOf(element));
  };
  container.addEventListener("pointerover", show);
  container.addEventListener("focusin", show);
  container.addEventListener("pointerout", hideTip);
  container.addEventListener("focusout", hideTip);
}
