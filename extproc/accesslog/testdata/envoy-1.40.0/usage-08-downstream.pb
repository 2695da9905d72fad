


edge-1fairlead.downstreamœ
™
Ù
	127.0.0.1ú¦
	127.0.0.1á½*ñ±²Øèéç®2¡à:¥¡:Bú±:JˆÃUR–`ZÓòZb»‹bj
	127.0.0.1›Žr
	127.0.0.1ºªzaŠé
¨
fairlead.log—
$
decision1795987697635-007-0001

plan2a2e85f7a0acc72f

reason
weighted
&

request_id1795987697635-007-0001

strategy	dynamic
-
fairlead.peek

modelm

stream 
.
fairlead.served

host127.0.0.1:34587

fairlead.sse

error 
>
fairlead.steer,
*
hosts!127.0.0.1:34587,127.0.0.1:34587šchat¢
	127.0.0.1ú¦²
	sse_errortrueºÚ§bÀÒ1795987697635-007-0001èÄð¬øó€ïˆ˜http127.0.0.1:40673*/v1/chat/completions2Go-http-client/1.1B	192.0.2.2J1795987697635-007-0001X¿`j&
x-request-id1795987697635-007-0001p²xg"
ÈŒä2via_upstream8_@Â