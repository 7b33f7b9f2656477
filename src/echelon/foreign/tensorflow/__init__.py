"""The engine `tensorflow`: backbones of keras-hub, trained by TensorFlow's distribution strategies."""
