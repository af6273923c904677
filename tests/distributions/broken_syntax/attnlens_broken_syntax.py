def attnlens_register_analysis(:
