from extensions.conftest import summary as summary
