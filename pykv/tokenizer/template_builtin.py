"""Chat templates by name, for models whose file holds none."""

CHATML = """\
{% for m in messages %}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""

LLAMA2 = """\
{% set ns = namespace(system='') %}
{% for m in messages %}
{% if m.role == 'system' %}
{% set ns.system = m.content %}
{% elif m.role == 'user' %}
{{- bos_token }}[INST] {% if ns.system %}<<SYS>>
{{ ns.system | trim }}
<</SYS>>

{% set ns.system = '' %}{% endif %}{{ m.content | trim }} [/INST]
{%- else %}
{{- ' ' }}{{ m.content | trim }} {{ eos_token }}
{%- endif %}
{% endfor %}
"""

LLAMA3 = """\
{{ bos_token }}
{%- for m in messages %}
<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>
{%- endfor %}
{%- if add_generation_prompt %}
<|start_header_id|>assistant<|end_header_id|>

{% endif %}
"""

GEMMA = """\
{{ bos_token }}
{%- set ns = namespace(system='') %}
{% for m in messages %}
{% if m.role == 'system' %}
{% set ns.system = m.content ~ '\\n\\n' %}
{% else %}
<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ ns.system }}{{ m.content | trim }}<end_of_turn>
{% set ns.system = '' %}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<start_of_turn>model
{% endif %}
"""

MISTRAL = """\
{{ bos_token }}
{%- set ns = namespace(system='') %}
{% for m in messages %}
{% if m.role == 'system' %}
{% set ns.system = m.content ~ '\\n\\n' %}
{% elif m.role == 'user' %}
[INST] {{ ns.system }}{{ m.content }} [/INST]
{%- set ns.system = '' %}
{% else %}
{{- ' ' }}{{ m.content | trim }}{{ eos_token }}
{%- endif %}
{% endfor %}
"""

ZEPHYR = """\
{% for m in messages %}
<|{{ m.role }}|>
{{ m.content }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}
<|assistant|>
{% endif %}
"""

PHI3 = """\
{{ bos_token }}
{%- for m in messages %}
<|{{ m.role }}|>
{{ m.content }}<|end|>
{% endfor %}
{% if add_generation_prompt %}
<|assistant|>
{% endif %}
"""

BUILTIN = {
    "chatml": CHATML,
    "gemma": GEMMA,
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "phi3": PHI3,
    "zephyr": ZEPHYR,
}
