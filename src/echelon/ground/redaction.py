"""What no output may contain: secrets, and characters that control a terminal.

A value is a secret by its name (`api_key`, `HF_TOKEN`), or by its form: key prefixes of services, authorization
headers, logins in URLs, private keys, `NAME=VALUE` and `--name VALUE` in a line of text. Under an ambiguous name
(`FOO_KEY`) it must also look random. References to secrets are not secrets: a path, a URL, an ARN, `$VARIABLE`. Nor are
vocabulary tokens.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

HIDDEN = "***"

Place = tuple[str | int, ...]

# Names in snake case. A value under one of these names is a secret.
_TELLING = re.compile(
    r"(?:^|_)(?:token|secret|password|passwd|passphrase|pwd|apikey|jwt|credentials?"
    r"|(?:api|access|private|secret|auth|signing|encryption)_key)(?:_?\d{1,2}|_(?:read|write|value|b64|base64))?$"
)
# Under these names a value is a secret only if it looks random.
_SUSPECT = re.compile(r"(?:^|_)(?:key|pat|auth|sas|sig|signature|dsn|cookie|webhook|connection_string)(?:_?\d{1,2})?$")
_IDENTIFIER = re.compile(r"(?:^|_)(?:kms|public|partition|sort|primary|foreign|cache)_key$")
# Names of vocabulary tokens, which are not secrets: `eos_token: </s>`.
_VOCABULARY = re.compile(
    r"(?:^|_)(?:[bes]o[a-z]|pad|unk|sep|cls|mask|special|image|video|audio|start|end|stop|new|extra|first|last|next"
    r"|prefix|suffix|middle|separator|delimiter|think|tool|role|user|system|assistant)_token$"
)
_MARKUP = re.compile(r"<.*>|\[.*\]|\W*", re.DOTALL)

# Values that refer to a secret, or that are placeholders.
_PLAIN = re.compile(
    r"""\$[A-Za-z_{(].*|.*(?:\$[({]|`).*|[*.x…]+|<.*>|\{.*|%\w+%|(?i:your[_-].*)|\d{1,5}
    |(?i:true|false|none|null|yes|no|on|off|auto|required|optional)
    |(?:/|~/|\.\.?/).*|(?i:arn:.*|[a-z][a-z0-9+.-]*://.*)
    |(?:os|self|args|config|settings|env|environ)\..*|\w+(?:\.\w+)*\(.*""",
    re.DOTALL | re.VERBOSE,
)
# An AWS secret key has 40 characters of base64, and may start like a path.
_BASE64_KEY = re.compile(r"(?=.*\d)(?=.*[a-z])(?=.*[A-Z])[A-Za-z0-9+/]{40}")
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
# Words, versions, dates and sizes, the usual parts of names.
_WORD = re.compile(
    r"(?:[A-Z]?[a-z]{1,24}|[A-Z]{1,12}|(?:[A-Z][a-z]+)+)\d{0,4}|\d{1,8}[A-Za-z]{0,3}|\d{1,3}x\d{1,3}[A-Za-z]?"
)
_SHORTEST_RANDOM = 16
_FEWEST_RANDOM = 12  # characters in no word
_LEAST_ENTROPY = 3.0  # bits a character; hexadecimal digits have at most 4

# The names of the two patterns above, within text.
_NAME = (
    r"(?P<name>[\w.-]*(?:token|secret|password|passwd|passphrase|pwd|jwt|credentials?|key|pat|auth|sas|sig|signature|dsn"
    r"|cookie|webhook|connection_string)(?:_?\d{1,2}|_(?:read|write|value|b64|base64))?)"
)
_VALUE = r"""(?P<secret>"[^"\n]*"|'[^'\n]*'|[^\s;&|"'`]+)"""
_ASSIGNED = re.compile(rf"(?i)(?<![\w$.-])(?:--?)?{_NAME}[\"']?(?P<between>[ \t]*:[ \t]*|[ \t]?=(?!=)[ \t]?){_VALUE}")
_OPTION = re.compile(rf"(?i)(?<!\S)--?{_NAME}\s+(?!-){_VALUE}")
_FOLLOWING = re.compile(rf"(?i)(?<![\w$.-]){_NAME}\s+{_VALUE}")
_NEAR = 20_000  # characters in which the brace before a name is looked for
_HEADER_OPTION = re.compile(r"(?:-H|--header)[ =]?[\"']?$")

# What a key has: in itself, or soon after, because a dot may cut it. Looking for it anywhere would take quadratic time.
_DIGIT, _RUN = (rf"(?=[A-Za-z0-9_-]*{part}|\S{{0,200}}{part})" for part in (r"\d", "[A-Za-z0-9]{16}"))
# Texts that are secrets by their form, each at the start of a word.
_KNOWN = re.compile(
    r"(?<![A-Za-z0-9_-])(?:"
    r"(?:hf_|api_org_)(?:(?=[a-z0-9]*[A-Z])(?=[A-Z0-9]*[a-z])(?=[A-Za-z]*\d)[A-Za-z0-9]{16,}|[A-Za-z0-9]{30,})"
    r"|gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}"
    r"|gl[a-z]{2,6}-(?=[A-Za-z0-9_-]{20})" + _DIGIT + r"[A-Za-z0-9_-]{20,}"
    r"|(?:sk|rk|pk)[-_](?=[A-Za-z0-9_-]{20})" + _RUN + _DIGIT + r"[A-Za-z0-9_-]{20,}"  # OpenAI, Anthropic, Stripe
    r"|(?:xox[a-z]|xapp)-(?=[A-Za-z0-9-]{10})" + _DIGIT + r"[A-Za-z0-9-]{10,}"  # Slack
    r"|(?:AKIA|ASIA)[0-9A-Z]{12,}|AIza[\w-]{35}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,}"  # AWS, Google
    r"|npm_[A-Za-z0-9]{36}|pypi-[\w-]{50,}|nvapi-[\w-]{40,}|r8_[A-Za-z0-9]{37}|dapi[0-9a-f]{32}|dop_v1_[0-9a-f]{64}"
    r"|wandb_v\d_\w{20,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}(?:\.[\w-]*)?)"
)
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY-----|\Z)", re.DOTALL
)
_SCHEME = r"(?:bearer|basic|token|digest|api-?key|negotiate|aws4-hmac-sha256)"


# C0 without tab and newline, DEL and C1; the marks that change the direction of text; halves of surrogate pairs. A
# carriage return may end a line, but not go back to its start.
_UNPRINTABLE = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]|\r(?!\n)")
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_REPLACEMENT = "\ufffd"


def make_printable(text: str) -> str:
    """The text with each character that could control a terminal, or that UTF-8 cannot encode, replaced by U+FFFD.

    Every text that people read goes through this: a run folder, a model or an error may have been made by a stranger.
    """
    return _UNPRINTABLE.sub(_REPLACEMENT, text)


def make_encodable(text: str) -> str:
    """The text with halves of surrogate pairs replaced by U+FFFD, and all else as it is."""
    return _HALF_PAIR.sub(_REPLACEMENT, text)


def redact(value: Any) -> Any:
    """A copy of plain values (mappings, lists, text) with secrets replaced by `***`."""
    return _redact(value, "")


def redact_text(text: str) -> str:
    """The text with secrets replaced by `***`; idempotent."""
    text = _PRIVATE_KEY.sub(HIDDEN, text)
    text = _KNOWN.sub(HIDDEN, text)
    for pattern, is_secret in _RULES:
        text = pattern.sub(partial(_hide_if, is_secret), text)
    return text


def find_secrets(value: Any, path: Place = (), name: str = "") -> Iterator[Place]:
    """Where in plain values something looks like a secret: the keys and indices that lead there, none of them one.

    `name` is the name of the value itself.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            shown = redact_text(key) if isinstance(key, str) else key
            if shown != key:
                yield (*path, shown)
            yield from find_secrets(item, (*path, shown), _name_of(key, value))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from find_secrets(item, (*path, index), name)
    elif isinstance(value, str) and _redact(value, name) != value:
        yield path


def _name_of(key: Any, mapping: Mapping[Any, Any]) -> str:
    """The name of a value: its key, or in an entry `{name: NAME, value: VALUE}` that name."""
    name = mapping.get("name")
    return name if key == "value" and isinstance(name, str) else str(key)


def _redact(value: Any, name: str) -> Any:
    """As `redact`, of what stands under a name; the items of a list stand under that of the list."""
    if isinstance(value, Mapping):
        return {
            redact_text(key) if isinstance(key, str) else key: _redact(part, _name_of(key, value))
            for key, part in value.items()
        }
    if isinstance(value, list | tuple):
        return [_redact(part, name) for part in value]
    if not isinstance(value, str):
        return value
    return HIDDEN if _is_telling(name, value) or _is_suspect(name, value) else redact_text(value)


def _is_telling(name: str, value: str) -> bool:
    """Whether the value is a secret because of its name."""
    words = _snake_case(name)
    if not _TELLING.search(words) or _is_plain(value):
        return False
    if not words.endswith("token"):
        return True
    inner = _unquote(value)
    return not (_VOCABULARY.search(words) or _MARKUP.fullmatch(inner) or " " in inner)


def _is_suspect(name: str, value: str) -> bool:
    """Whether the name may be that of a secret and the value looks random."""
    words = _snake_case(name)
    is_it = _TELLING.search(words) or (_SUSPECT.search(words) and not _IDENTIFIER.search(words))
    return bool(is_it) and not _is_plain(value) and _looks_random(_unquote(value))


def _snake_case(name: str) -> str:
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return re.sub(r"[^a-z0-9]+", "_", split.lower()).strip("_")


def _unquote(value: str) -> str:
    return value.strip().strip("\"'").strip()


def _is_plain(value: str) -> bool:
    inner = _unquote(value)
    return not inner or (bool(_PLAIN.fullmatch(inner)) and not _BASE64_KEY.fullmatch(inner))


def _looks_random(value: str) -> bool:
    """Whether letters and digits are mixed as in a key, and not words, versions, dates, or numbers of a UUID."""
    if len(value) < _SHORTEST_RANDOM or " " in value or _UUID.fullmatch(value):
        return False
    chunks = re.split(r"[^A-Za-z0-9]+", value)
    if sum(len(chunk) for chunk in chunks if not _WORD.fullmatch(chunk)) < _FEWEST_RANDOM:
        return False
    shares = [count / len(value) for count in Counter(value).values()]
    return -sum(share * math.log2(share) for share in shares) >= _LEAST_ENTROPY


def _hide_if(is_secret: Callable[[re.Match[str]], bool], match: re.Match[str]) -> str:
    """The match with its secret replaced; quotes and closing punctuation stay."""
    if not is_secret(match):
        return match[0]
    secret, start = match["secret"], match.start("secret") - match.start()
    inner = secret.strip("\"'") if secret[:1] in "\"'" else secret.rstrip(",.:)]}\"'")
    begin = start + secret.index(inner)
    return match[0][:begin] + HIDDEN + match[0][begin + len(inner) :]


def _is_assigned(match: re.Match[str]) -> bool:
    """Whether `NAME=VALUE` is a secret; with a colon, only if the text is clearly not prose."""
    name, value, between = match["name"], match["secret"].rstrip(",.:)]}"), match["between"]
    is_header = _HEADER_OPTION.search(match.string, max(0, match.start() - 12), match.start()) is not None
    is_mapped = between == "=" or match["secret"][0] in "\"'" or _is_in_braces(match) or is_header
    return (is_mapped and _is_telling(name, value)) or _is_suspect(name, value)


def _is_in_braces(match: re.Match[str]) -> bool:
    text, start = match.string, match.start()
    near = max(0, start - _NEAR)
    return text.rfind("{", near, start) > text.rfind("}", near, start)


def _is_given(match: re.Match[str]) -> bool:
    return not _is_plain(match.groupdict().get("password", match["secret"]))


def _is_random(match: re.Match[str]) -> bool:
    return _is_given(match) and _looks_random(match["secret"])


_LINE = r"[^\n|;&]{0,200}?"
# Patterns whose group `secret` is replaced if the function returns true.
_RULES: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], bool]], ...] = (
    # The login in a URL: with a password, or only a key.
    (re.compile(r"(?<=://)(?P<secret>[^/\s@:\"']*:(?P<password>[^/\s@\"']+))(?=@)"), _is_given),
    (re.compile(r"(?<=://)(?P<secret>[^/\s@:\"']{16,})(?=@)"), _is_random),
    (re.compile(rf"(?i)\bauthorization\b[\"']?\s*[:=]\s*[\"']?{_SCHEME}\s+(?P<secret>[^\s\"',;]+)"), _is_given),
    (re.compile(r"(?i)\bbearer\s+(?P<secret>[\w.~+/=-]{16,})"), _is_random),
    (_ASSIGNED, _is_assigned),
    (_OPTION, lambda match: len(_unquote(match["secret"])) >= 6 and _is_telling(match["name"], match["secret"])),
    (_FOLLOWING, lambda match: _is_suspect(match["name"], match["secret"])),
    # Commands with a positional secret or a special option.
    (re.compile(r"\bwandb[. ]login\b[^\n]{0,60}?(?<![0-9a-f])(?P<secret>[0-9a-f]{40})(?![0-9a-f])"), _is_given),
    (re.compile(r"\bmachine\s+\S{1,200}\s+login\s+\S{1,200}\s+password\s+(?P<secret>\S+)"), _is_given),
    (re.compile(rf"\b(?:curl|wget)\b{_LINE}\s(?:-u|--user)[ =]*+[\"']?[^\s:\"']*:(?P<secret>[^\s\"']+)"), _is_given),
    (re.compile(rf"\b(?:login|sshpass)\b{_LINE}\s-p\s*(?P<secret>[^\s-]\S*)"), _is_given),
)
