// Creates and finds elements, and shows the tooltip.

const find = (selector) => document.querySelector(selector);

/** Creates an element. Names come from files, so nothing is parsed as HTML. */
function createElement(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element && name !== "style") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

function createSvgElement(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Announces a text to screen readers. */
function announce(text) {
  find("#announcement").textContent = text;
}

const MARGIN = 8;

/** Shows lines of text next to an element, inside the window. */
function showTip(element, lines) {
  const tip = find("#tip");
  tip.replaceChildren(...lines.map((line, k) => createElement("div", { className: k ? "" : "first" }, line)));
  tip.hidden = false;
  const target = element.getBoundingClientRect();
  const size = tip.getBoundingClientRect();
  const left = Math.min(target.left, window.innerWidth - size.width - MARGIN);
  const above = target.top - size.height - MARGIN;
  tip.style.left = `${Math.max(MARGIN, left)}px`;
  tip.style.top = `${above < MARGIN ? target.bottom + MARGIN : above}px`;
}

function hideTip() {
  find("#tip").hidden = true;
}

/** Shows a tooltip for each element with `data-tip` in `container` while it is hovered or focused. */
function addTooltips(container, getLines) {
  const show = (event) => {
    const element = event.target.closest("[data-tip]");
    if (element) showTip(element, getLines(element));
  };
  container.addEventListener("pointerover", show);
  container.addEventListener("focusin", show);
  container.addEventListener("pointerout", hideTip);
  container.addEventListener("focusout", hideTip);
}
