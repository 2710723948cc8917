// Starts the page.

async function start() {
  const contents = await unpackContents();
  showFacts(contents);
  const cards = new Cards(contents);
  let table = null;
  const choose = (index) => {
    cards.choose(index);
    table.mark(index);
  };
  new Treemap(contents, choose);
  new HeatMap(contents);
  table = new ArrayTable(contents, choose);
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !event.target.closest("input, select")) {
      event.preventDefault();
      find("#search").focus();
    }
  });
  document.documentElement.dataset.ready = "yes";
}

start();
