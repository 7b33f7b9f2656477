"""The engine `deepspeed`: ZeRO and offloading by the library of that name, behind the Engine protocol."""
