'use strict';
// The list of responses: filters, search and order. Texts are inserted as text only.
const RANGES = ['step', 'reward', 'length', 'staleness'];
const data = JSON.parse(document.getElementById('samples')?.textContent || '{"rows":[]}');
const controls = document.getElementById('controls');
const view = {count: 20, prompt: null, open: new Set()};

function make(tag, properties, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}
const setting = name => controls.elements[name].value;
const number = x => x == null ? '–' : Number.isInteger(x) ? String(x) : x.toFixed(3);

function matches(row) {
  const text = setting('text').toLowerCase();
  const inRange = name => {
    const least = setting(name + '_min'), most = setting(name + '_max');
    return (!least || (row[name] != null && row[name] >= +least))
      && (!most || (row[name] != null && row[name] <= +most));
  };
  return (view.prompt === null || row.promptText === view.prompt)
    && (!text || (row.promptText + '\n' + row.text).toLowerCase().includes(text))
    && ['of', 'searcher', 'finish'].every(x => !setting(x) || String(row[x]) === setting(x))
    && RANGES.every(inRange);
}

function ordered(rows) {
  const [, minus, name] = setting('order').match(/^(-?)(.*)$/);
  const rank = row => row[name] == null ? Infinity : minus ? -row[name] : row[name];
  return rows.sort((a, b) => rank(a) === rank(b) ? 0 : rank(a) - rank(b));
}

// Tokens with their log ratios as colours; an episode is divided into turns.
function response(row) {
  const colour = setting('colour'), values = row[colour], sampled = row.is_sampled || [];
  const isEpisode = sampled.includes(0);
  const body = make('div', {className: 'response'});
  let turn = null;
  row.tokens.forEach((token, i) => {
    if (!turn || (isEpisode && sampled[i] !== sampled[i - 1])) {
      turn = make('pre', {className: sampled[i] === 0 ? 'environment' : 'policy'});
      if (isEpisode) body.append(make('small', {textContent: turn.className}));
      body.append(turn);
    }
    const piece = make('span', {textContent: token});
    if (values && colour === 'is_sampled') {
      if (!values[i]) piece.style.background = 'rgba(128,128,128,.5)';
    } else if (values) {
      const strength = Math.min(Math.abs(values[i]) / 200, 1) * .7;
      const tone = values[i] > 0 ? '0,114,178' : '230,120,0';
      piece.style.background = `rgba(${tone},${strength.toFixed(2)})`;
      piece.title = (values[i] / 100).toFixed(2);
    }
    turn.append(piece);
  });
  if (colour && row.of === 'train') body.append(make('small', {textContent: legend(colour, values)}));
  return body;
}

function legend(colour, values) {
  if (colour === 'is_sampled') {
    return values ? 'Grey: written by the environment.' : 'The policy sampled every token.';
  }
  return values ? 'Blue: the trained policy gives the token a higher probability. Orange: a lower one.'
    : 'Not known for each token, only as a sum.';
}

function detail(row) {
  const [, prompt, answer] = data.prompts[row.prompt];
  const facts = {reward: row.reward, ...row.parts, 'weights of step': row.version,
    staleness: row.staleness, searcher: row.searcher, tokens: row.length, finish: row.finish,
    'log π − log reference, whole response': row.reference_sum};
  const line = Object.entries(facts).filter(([, x]) => x != null)
    .map(([name, x]) => `${name} ${typeof x === 'number' ? number(x) : x}`).join(' · ');
  const same = make('button', {type: 'button', className: 'same',
    textContent: view.prompt === null ? 'all responses to this prompt' : 'all prompts'});
  same.onclick = () => { view.prompt = view.prompt === null ? prompt : null; draw(); };
  return make('div', {className: 'detail'}, make('pre', {textContent: prompt}),
    make('small', {textContent: answer && 'answer: ' + answer}), response(row),
    make('p', {textContent: line}), same);
}

function item(row) {
  const head = make('summary', {},
    make('span', {textContent: `${row.of === 'eval' ? 'evaluation' : 'step'} ${row.step}`}),
    make('span', {textContent: 'reward ' + number(row.reward)}),
    make('span', {textContent: row.staleness == null ? '' : 'staleness ' + row.staleness}),
    make('code', {textContent: row.promptText.slice(-60)}),
    make('code', {textContent: row.text.slice(0, 120)}));
  const node = make('details', {open: view.open.has(row)}, head);
  if (node.open) node.append(detail(row));
  head.onclick = event => {
    event.preventDefault();
    view.open.has(row) ? view.open.delete(row) : view.open.add(row);
    draw();
  };
  return node;
}

function draw() {
  const rows = ordered(data.rows.filter(matches));
  document.getElementById('found').textContent =
    `${rows.length} of ${data.rows.length} responses` + (view.prompt === null ? '' : ' · one prompt');
  document.getElementById('rows').replaceChildren(...rows.slice(0, view.count).map(item));
  document.getElementById('more').hidden = rows.length <= view.count;
}

if (controls) {
  for (const row of data.rows) {
    row.promptText = data.prompts[row.prompt][1];
    row.text = row.tokens.join('');
  }
  for (const name of ['searcher', 'finish']) {
    const found = [...new Set(data.rows.map(row => row[name]).filter(x => x != null))].sort();
    controls.elements[name].append(make('option', {value: '', textContent: 'any'}),
      ...found.map(x => make('option', {value: x, textContent: x})));
  }
  controls.onsubmit = () => false;
  controls.oninput = () => { view.count = 20; draw(); };
  document.getElementById('more').onclick = () => { view.count += 200; draw(); };
  draw();
}
