data.input_type=image
data.prompt_key=prompt
