"""Large transformers in closed form: shapes, layouts over devices, bytes and seconds of a step."""
