"""A chat template that puts the `documents` of a request between separators."""

from lmc.blend.segments import PASSES, bare_and_apart

# Text before a model's own template. It puts the documents before the content of the user's first message, so that the
# prefix of the prompt stays the same from turn to turn. Other fields of the message are kept. Content is a text, or a
# list of parts if the model's own template iterates over parts. That template gets no documents, so that it does not
# write them a second time.
PRELUDE = """\
{%- if documents %}
{%- set lmc = namespace(text='', messages=[], placed=false) %}
{%- for document in documents %}
{%- set lmc.one = (document.text or document.content or '') | trim %}
{%- if not lmc.one %}{{ raise_exception('a document of this request has no text') }}{%- endif %}
{%- set lmc.text = lmc.text ~ SEPARATOR ~ lmc.oneAPART %}
{%- endfor %}
{%- set lmc.text = lmc.text ~ SEPARATOR %}
{%- for message in messages %}
{%- if message.role == 'user' and not lmc.placed %}
{%- set lmc.placed = true %}
{%- if message.content is string %}
{%- set lmc.messages = lmc.messages + [dict(message, content=lmc.text ~ message.content)] %}
{%- else %}
{%- set lmc.messages = lmc.messages + [dict(message, content=[{'type': 'text', 'text': lmc.text}] + message.content)] %}
{%- endif %}
{%- else %}
{%- set lmc.messages = lmc.messages + [message] %}
{%- endif %}
{%- endfor %}
{%- if not lmc.placed %}{{ raise_exception('a request with documents needs a message of the user') }}{%- endif %}
{%- set messages = lmc.messages %}
{%- set documents = none %}
{%- endif %}
"""


def with_documents(template: str, separator: str) -> str:
    """Return a chat template that puts the `text` (or `content`) of each of a request's documents between separators.

    A separator inside a document is replaced so that it does not cut the document, as in `lmc.rag.messages`. Without
    documents, the template is equivalent to `template`.
    """
    bare, apart = map(_quoted, bare_and_apart(separator))
    prelude = PRELUDE.replace("APART", f" | replace({bare}, {apart})" * PASSES)
    return prelude.replace("SEPARATOR", _quoted(separator)) + template


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
